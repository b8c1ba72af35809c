"""Writes what the Helm chart has from elsewhere: rules, dashboards, schema, table, version; ``--check`` compares."""

import json
import re
import sys
from pathlib import Path

from chart_schema import Value, leaves, read, schema
from generated import ROOT, markdown_table, write_or_check

from exporter import __version__
from exporter.config.options import OPTIONS
from exporter.service.settings import OPTIONS as SERVE_OPTIONS

CHART = ROOT / "deploy" / "helm" / "gpu-cost-exporter"
DASHBOARDS = ("fleet", "oncall", "finops")
TABLE = "<!-- From here on made by scripts/chart.py from values.yaml. -->\n"
_LONGEST = 60


def outputs() -> dict[Path, str]:
    """What each generated file must hold."""
    values = read(CHART / "values.yaml")
    copies = {
        CHART / "files" / "prometheus-rules.yaml": ROOT / "rules" / "prometheus-rules.yaml",
        CHART / "files" / "prometheus-rules-ineffective.yaml": ROOT / "rules" / "prometheus-rules-ineffective.yaml",
        **{
            CHART / "files" / "dashboards" / f"{name}.json": ROOT / "dashboards" / f"{name}.json" for name in DASHBOARDS
        },
    }
    return {
        **{path: source.read_text(encoding="utf-8") for path, source in copies.items()},
        CHART / "files" / "durations.json": json.dumps(durations(), indent=1) + "\n",
        CHART / "values.schema.json": json.dumps(schema(values), indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(values),
        CHART / "Chart.yaml": versioned((CHART / "Chart.yaml").read_text(encoding="utf-8")),
    }


def durations() -> dict[str, dict[str, dict[str, object]]]:
    """Bounds of every option that is a duration, in seconds, as templates compare them; and its default."""
    return {
        part: {
            option.key: {
                "least": float(option.kind.bounds[0]),
                "most": float(option.kind.bounds[1]),
                "allowed": option.kind.allowed,
                "default": option.default,
            }
            for option in options
            if option.kind.bounds and option.kind.metavar == "DURATION"
        }
        for part, options in (("agent", OPTIONS), ("service", SERVE_OPTIONS))
    }


def versioned(text: str) -> str:
    """Chart.yaml with the program's version."""
    return re.sub(r"^appVersion: .*$", f'appVersion: "{__version__}"', text, flags=re.MULTILINE)


def readme(values: dict[str, Value]) -> str:
    """The chart's page: its own words, then the table."""
    head = (CHART / "README.md").read_text(encoding="utf-8").partition(TABLE)[0]
    rows = [(f"`{value.path}`", _default(value.default), value.about) for value in leaves(values)]
    return "\n".join([head + TABLE, "## Values", "", *markdown_table(("Key", "Default", "Meaning"), rows), ""])


def _default(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= _LONGEST else "see values.yaml"


def main() -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference, or values.yaml lacks something."""
    try:
        return write_or_check(outputs())
    except ValueError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
