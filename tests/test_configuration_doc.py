import re
import subprocess
import sys
from pathlib import Path

from exporter.config import load_agent
from exporter.config.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_configuration_document_matches_the_options_table() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/configuration_doc.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_example_file_has_every_key_and_only_default_values(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert re.findall(r"^# ([a-z-]+): ", example, re.MULTILINE) == [option.key for option in OPTIONS]
    settled = [re.sub(r"^# (?=[a-z-]+: )", "", line) for line in example.splitlines() if "# unset" not in line]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(settled))
    assert load_agent({"config": str(file)}, {}, check_paths=False) == load_agent({}, {}, check_paths=False)
