"""Writes generated files; with ``--check`` reports those that differ from what they are made from."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(outputs: Mapping[Path, str]) -> int:
    """Write the files that differ, or with ``--check`` name them; exit code 1 if there is one to name."""
    differing = [
        path for path, text in outputs.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in differing:
            print(f"{path.relative_to(ROOT)} is not what it is made from; run: make golden, and look at the difference")
        return 1 if differing else 0
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outputs[path], encoding="utf-8")
    return 0


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> Iterator[str]:
    """Yield the lines of a table."""
    for cells in (head, [rule] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
