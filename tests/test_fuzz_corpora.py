"""Every kept input of fuzzing runs again: its entry point answers, or reports an error as documented."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import fuzz_targets  # noqa: E402 - the folder of benchmarks is no package

CORPORA = ROOT / "tests" / "corpora"
MOST_FILES, MOST_BYTES = 60, 100 * 1024


@pytest.fixture(autouse=True)
def quiet_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a folder of this test for the files, and keep log records with an exception."""
    monkeypatch.setattr(fuzz_targets.Scratch, "directory", tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    fuzz_targets.quiet()
    yield
    root.handlers = handlers
    root.setLevel(level)  # unlike an assignment, this also clears the loggers' cache of disabled levels


@pytest.mark.parametrize("path", list(fuzz_targets.TARGETS))
def test_every_kept_input_gives_the_documented_result(path: str) -> None:
    inputs = fuzz_targets.TARGETS[path].inputs()
    assert inputs, f"{path} has no kept input"
    for one in inputs:
        try:
            fuzz_targets.run(fuzz_targets.TARGETS[path], one.read_bytes())
        except Exception as error:
            raise AssertionError(f"{one.name}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("family", sorted(path.name for path in CORPORA.iterdir()))
def test_corpora_are_small_and_every_input_has_a_target(family: str) -> None:
    kept = list((CORPORA / family).iterdir())
    assert len(kept) <= MOST_FILES
    assert sum(path.stat().st_size for path in kept) <= MOST_BYTES
    assert {f"{family}/{path.name.partition('.')[0]}" for path in kept} <= set(fuzz_targets.TARGETS)
