"""Writes docs/openapi.json from the tables of the cost service; ``--check`` compares."""

import json
import sys

from generated import ROOT, write_or_check

from exporter.service.openapi import document


def text() -> str:
    """Return the file, with a constant version: that of the release would change the file at each release."""
    found = document()
    found["info"]["version"] = "1"
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({ROOT / "docs" / "openapi.json": text()}))
