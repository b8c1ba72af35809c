"""Writes generated files; ``--check`` reports the files that differ from their sources."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(outputs: Mapping[Path, str]) -> int:
    """Write the files that differ, or with ``--check`` report them; exit code 1 for a difference with ``--check``."""
    differing = [
        path for path, text in outputs.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in differing:
            print(f"{path.relative_to(ROOT)} differs from its sources; run: make golden, and review the difference")
        return 1 if differing else 0
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outputs[path], encoding="utf-8")
    return 0


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> Iterator[str]:
    """Yield the lines of a table."""
    for cells in (head, [rule] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
