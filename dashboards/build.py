"""Builds the dashboards with the Grafana foundation SDK; ``--check`` only compares them with what is committed."""

import json
import sys
from pathlib import Path

import finops
import fleet
import oncall

HERE = Path(__file__).resolve().parent
BOARDS = {"fleet": fleet.build, "oncall": oncall.build, "finops": finops.build}


def main() -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference."""
    only_check, differ = "--check" in sys.argv[1:], False
    for name, build in BOARDS.items():
        path = HERE / f"{name}.json"
        wanted = json.dumps(build(), indent=1, sort_keys=True) + "\n"
        if not only_check:
            path.write_text(wanted, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            sys.stderr.write(f"dashboards/{name}.json is not what dashboards/build.py gives; run: make golden\n")
            differ = True
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
