"""Errors that the program raises on purpose; each message states the fault, its place and the fix."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(text: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message: the word most similar to a text; empty without a similar word."""
    close = get_close_matches(text, list(words), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def expected(text: str, words: Iterable[str], allowed: str, cutoff: float = 0.6) -> str:
    """Return the end of a message: the word most similar to a text, if any, and the allowed values."""
    hint = did_you_mean(text, words, cutoff)
    return f"{hint} Allowed: {allowed}" if hint else f"; allowed: {allowed}"


class ExporterError(Exception):
    """Base class of the errors that users can see. Exit code 1: a retry can succeed."""


class ConfigError(ExporterError):
    """One or more mistakes in the user's input: flags, environment, files. Exit code 2: a retry cannot succeed.

    ``problems`` has one line per mistake: the file and line or key, the value, and the allowed values.
    """

    def __init__(self, *problems: str) -> None:
        """Store the individual mistakes, so that one report can list all of them."""
        super().__init__("\n".join(problems))
        self.problems = problems


class ReasonedError(ExporterError):
    """An error with a reason in snake case, which becomes a label value."""

    def __init__(self, reason: str, message: str) -> None:
        """Store the reason separately from the message."""
        super().__init__(message)
        self.reason = reason


class SourceError(ReasonedError):
    """A source of readings cannot work now."""


class NoValuesError(SourceError):
    """A source answers but has no values yet; its devices are healthy. The source stays open and is read again."""


class AttributionError(ReasonedError):
    """The kubelet did not answer, or its answer is unreadable."""


class StateError(ReasonedError):
    """The state file cannot be read or written."""


class ApiError(ReasonedError):
    """The Kubernetes API did not answer, or its answer is unreadable.

    ``retry_after_seconds`` is the delay that it requests.
    """

    def __init__(self, reason: str, message: str, *, retry_after_seconds: float | None = None) -> None:
        """Store the value that callers act on separately from the message."""
        super().__init__(reason, message)
        self.retry_after_seconds = retry_after_seconds


class PrometheusError(ReasonedError):
    """Prometheus, or a server with its API, did not answer, or its answer is unreadable.

    ``retriable`` is true if the same query can succeed later, for example after a timeout, a 503 or a lost connection.
    """

    def __init__(
        self, reason: str, message: str, *, retriable: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        """Store the values that callers act on separately from the message."""
        super().__init__(reason, message)
        self.retriable = retriable
        self.retry_after_seconds = retry_after_seconds


class StoreError(ReasonedError):
    """The store of closed days cannot be opened, read or written."""
