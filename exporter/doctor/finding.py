"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is; a fail is what keeps the agent from doing its work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor: the check, how it went, what was seen, and how to mend it (empty when all is well)."""

    name: str
    level: Level
    cause: str
    mend: str = ""


def ok(name: str, cause: str) -> Finding:
    """All is well."""
    return Finding(name=name, level=Level.OK, cause=cause)


def warn(name: str, cause: str, mend: str) -> Finding:
    """The agent works, but some of what it shows is missing or unsure."""
    return Finding(name=name, level=Level.WARN, cause=cause, mend=mend)


def fail(name: str, cause: str, mend: str) -> Finding:
    """The agent cannot do its work."""
    return Finding(name=name, level=Level.FAIL, cause=cause, mend=mend)
