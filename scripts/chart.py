"""Writes the generated files of the Helm chart: rules, dashboards, schema, table, version; ``--check`` compares."""

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
TABLE = "<!-- Generated from values.yaml by scripts/chart.py: do not edit below this line. -->\n"
_LONGEST = 60


def outputs() -> dict[Path, str]:
    """Return the contents of each generated file."""
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
    """Return bounds in seconds and default of every option that is a duration, for the checks of the templates."""
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
    """Return Chart.yaml with the version of the program."""
    return re.sub(r"^appVersion: .*$", f'appVersion: "{__version__}"', text, flags=re.MULTILINE)


def readme(values: dict[str, Value]) -> str:
    """Return the README of the chart: the existing text and the generated table."""
    head = (CHART / "README.md").read_text(encoding="utf-8").partition(TABLE)[0]
    rows = [(f"`{value.path}`", _default(value.default), value.about) for value in leaves(values)]
    return "\n".join([head + TABLE, "## Values", "", *markdown_table(("Key", "Default", "Meaning"), rows), ""])


def _default(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= _LONGEST else "see values.yaml"


def main() -> int:
    """Write or compare the files; exit code 1 for a difference with ``--check``, or a mistake in values.yaml."""
    try:
        return write_or_check(outputs())
    except ValueError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
