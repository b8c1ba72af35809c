"""Writes docs/openapi.json from the tables of the cost service; ``--check`` only says whether it is up to date."""

import json
import sys

from generated import ROOT, write_or_check

from exporter.service.openapi import document


def text() -> str:
    """The whole file; the version is the release's and would change it with every one."""
    found = document()
    found["info"]["version"] = "1"
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({ROOT / "docs" / "openapi.json": text()}))
