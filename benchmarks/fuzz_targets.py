"""What is fuzzed: by family, each door of the product with what it may answer and what must hold of the answer."""

import importlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[bytes], None]


LONGEST_MESSAGE = 20_000


class BrokenPromise(Exception):  # noqa: N818 - what it is
    """A door answered, and the answer is not what it promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A door: ``run`` takes bytes as the product would and raises what is found."""

    family: str
    name: str
    run: Run
    allowed: tuple[type[Exception], ...]
    """What the door says that it raises."""
    most_bytes: int

    @property
    def path(self) -> str:
        """``family/name``."""
        return f"{self.family}/{self.name}"


TARGETS: dict[str, Target] = {}
"""By path, in the order in which modules name them."""


def target(family: str, name: str, *allowed: type[Exception], most_bytes: int = 4096) -> Callable[[Run], Run]:
    """Enter a function as a target."""

    def enter(run: Run) -> Run:
        one = Target(family=family, name=name, run=run, allowed=allowed, most_bytes=most_bytes)
        TARGETS[one.path] = one
        return run

    return enter


def families() -> tuple[str, ...]:
    """Every family, in the order of its first target."""
    return tuple(dict.fromkeys(one.family for one in TARGETS.values()))


def of_family(family: str) -> tuple[Target, ...]:
    """Its targets."""
    return tuple(one for one in TARGETS.values() if one.family == family)


MODULES = {
    "fuzz_node": ("kubelet", "process", "ids", "wire", "dcgm"),
    "fuzz_files": ("csv", "yaml", "prices", "options"),
    "fuzz_state": ("state",),
    "fuzz_api": ("api",),
    "fuzz_prometheus": ("prometheus",),
    "fuzz_web": ("http",),
}
"""Families by the module that has their targets."""


def load(family: str = "") -> None:
    """Import the module of a family, or every one: they enter their targets in ``TARGETS``."""
    for module, has in MODULES.items():
        if not family or family in has:
            importlib.import_module(module)


class Scratch:
    """A folder for the files that doors read, in memory where the system has such a place."""

    directory: Path | None = None
    """Set by who runs the targets; else made at the first use."""

    @classmethod
    def folder(cls) -> Path:
        """The folder."""
        if cls.directory is None:
            cls.directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
        return cls.directory

    @classmethod
    def file(cls, name: str, content: bytes) -> Path:
        """A file of this content."""
        path = cls.folder() / name
        path.write_bytes(content)
        return path


class _Unexpected(logging.Handler):
    """Keeps what the product caught as a last resort: it goes on, and an input that does that is a finding."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and self.error is None:
            self.error = record.exc_info[1]


UNEXPECTED = _Unexpected()


def quiet() -> None:
    """Log nothing, but keep what was logged with its exception."""
    root = logging.getLogger()
    root.handlers = [UNEXPECTED]
    root.setLevel(logging.ERROR)


def run(one: Target, data: bytes) -> None:
    """Put an input to a target; whatever it raises is a finding."""
    UNEXPECTED.error = None
    try:
        one.run(data)
    except one.allowed as told:
        check_message(told)
    if UNEXPECTED.error is not None:
        raise UNEXPECTED.error


def check_message(error: Exception) -> None:
    """A message can be written to a terminal and a log as lines of text."""
    for line in getattr(error, "problems", (str(error),)):
        require(bool(line.strip()), "an error without words")
        require(len(line) < LONGEST_MESSAGE, f"a message of {len(line)} characters")


def require(holds: bool, promise: str) -> None:  # noqa: FBT001 - as assert has it
    """Raise where a promise does not hold."""
    if not holds:
        raise BrokenPromise(promise)


def require_finite(values: Iterable[float | None], what: str, *, least: float = -math.inf) -> None:
    """Raise where a value that is shown is no number, or is less than it can be."""
    for value in values:
        if value is not None:
            require(math.isfinite(value) and value >= least, f"{what} is {value}")


def require_json(text: str | bytes) -> None:
    """Raise where a document is no JSON, or has a number that JSON has not."""

    def refuse(name: str) -> None:
        raise BrokenPromise(f"{name} in a document")

    json.loads(text, parse_constant=refuse)
