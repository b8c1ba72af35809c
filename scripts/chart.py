"""Writes what the Helm chart has from elsewhere: rules, dashboards, schema, table, version; ``--check`` compares."""

import json
import re
import sys
from pathlib import Path

from chart_schema import Value, leaves, read, schema

from exporter import __version__
from exporter.config.options import OPTIONS
from exporter.service.settings import OPTIONS as SERVE_OPTIONS

ROOT = Path(__file__).resolve().parent.parent
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
    rows = [f"| `{value.path}` | {_default(value.default)} | {_cell(value.about)} |" for value in leaves(values)]
    return (
        "\n".join([head + TABLE, "## Values", "", "| Key | Default | Meaning |", "| --- | --- | --- |", *rows]) + "\n"
    )


def _default(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"`{_cell(text)}`" if len(text) <= _LONGEST else "see values.yaml"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main(arguments: list[str]) -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference, or values.yaml lacks something."""
    try:
        wanted = outputs()
    except ValueError as error:
        print(error)
        return 1
    differing = [
        path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in differing:
            print(f"{path.relative_to(ROOT)} is not what it is made from; run: python scripts/chart.py")
        return 1 if differing else 0
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
