import subprocess
import sys
from pathlib import Path

from exporter.metrics import catalog
from exporter.metrics.dcgm_names import TABLE

ROOT = Path(__file__).resolve().parent.parent


def test_metrics_document_matches_the_catalogue() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/metrics_doc.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_every_metric_and_every_field_has_its_row() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [metric.name for metric in catalog.ALL if f"| `{metric.name}` |" not in text] == []
    assert [row.legacy_name for row in TABLE if f"| {int(row.field)} | `{row.legacy_name}` |" not in text] == []
