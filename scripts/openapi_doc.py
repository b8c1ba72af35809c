"""Writes docs/openapi.json from the tables of the cost service; ``--check`` only says whether it is up to date."""

import json
import sys
from pathlib import Path

from exporter.service.openapi import document

TARGET = Path(__file__).resolve().parent.parent / "docs" / "openapi.json"


def text() -> str:
    """The whole file; the version is the release's and would change it with every one."""
    found = document()
    found["info"]["version"] = "1"
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file, or with ``--check`` compare it; 1 where it is out of date."""
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text():
            return 0
        print("docs/openapi.json is out of date: run `python scripts/openapi_doc.py` and look at the difference")
        return 1
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
