"""Chooses what tests/corpora/ has of a target: the fewest inputs that reach all lines of ours that any reaches."""

import hashlib
import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import fuzz_targets
from fuzz import CACHE, CORPORA, kept
from fuzz_targets import Target

MOST_FILES, MOST_BYTES = 60, 100 * 1024
"""Of a family."""
_MOST_LOOKED_AT = 3000
_OURS = f"{os.sep}exporter{os.sep}"

Line = tuple[str, int]


def keep(wanted: Iterable[Target]) -> None:
    """Choose again for each of the targets; what the repository has and what was grown are looked at together."""
    fuzz_targets.quiet()
    for target in wanted:
        beside = len(fuzz_targets.of_family(target.family))
        grown = CACHE / "corpus" / target.family / target.name
        before = kept(target)
        named = [path for path in before if "-" in path.name]
        candidates = [path.read_bytes() for path in (*before, *(grown.iterdir() if grown.is_dir() else ()))]
        chosen = _chosen(target, candidates, MOST_FILES // beside - len(named), MOST_BYTES // beside)
        folder = CORPORA / target.family
        folder.mkdir(parents=True, exist_ok=True)
        for path in set(before) - set(named):
            path.unlink()
        for data in chosen:
            (folder / f"{target.name}.{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)
        print(f"{target.path}: {len(chosen)} of {len(candidates)} inputs, {sum(map(len, chosen)):,} bytes", flush=True)


def _chosen(target: Target, candidates: list[bytes], most_files: int, most_bytes: int) -> list[bytes]:
    """Take, again and again, the input that adds most lines; of those that add as many the shortest."""
    shortest = sorted(set(candidates), key=len)[:_MOST_LOOKED_AT]
    reached = {data: lines for data in shortest if (lines := _reached(target, data)) is not None}
    chosen: list[bytes] = []
    covered: set[Line] = set()
    size = 0
    while len(chosen) < most_files:
        fitting = [data for data in reached if size + len(data) <= most_bytes]
        best = max(fitting, key=lambda data: (len(reached[data] - covered), -len(data)), default=None)
        if best is None or not reached[best] - covered:
            break
        chosen.append(best)
        covered |= reached.pop(best)
        size += len(best)
    return chosen


def _reached(target: Target, data: bytes) -> frozenset[Line] | None:
    """Lines of ours that an input reaches; ``None`` for a finding, which has no place here before it is fixed."""
    lines: set[Line] = set()

    def local(frame: FrameType, event: str, _argument: Any) -> Any:  # noqa: ANN401 - as sys.settrace has it
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:  # noqa: ANN401 - as above
        return local if _OURS in frame.f_code.co_filename else None

    sys.settrace(enter)
    try:
        fuzz_targets.run(target, data)
    except Exception as error:  # noqa: BLE001 - any finding
        sys.settrace(None)
        print(f"  not kept, a finding: {type(error).__name__}: {str(error)[:200]}")
        return None
    finally:
        sys.settrace(None)
    return frozenset(lines)
