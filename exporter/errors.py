"""Errors that the program raises on purpose; each message says what is wrong, where, and how to fix it."""


class ExporterError(Exception):
    """Root of the errors that a user can meet. Exit code 1: it may pass by itself."""


class ConfigError(ExporterError):
    """One or more mistakes in what the user wrote: flags, environment, files. Exit code 2: it does not pass by itself.

    ``problems`` has one line per mistake, each naming the file and line or key, the value, and what is allowed.
    """

    def __init__(self, *problems: str) -> None:
        """Keep the single mistakes, so that all of them can be told at once."""
        super().__init__("\n".join(problems))
        self.problems = problems


class SourceError(ExporterError):
    """A source of readings cannot work now. ``reason`` is snake case and becomes a label value."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason apart from the words."""
        super().__init__(message)
        self.reason = reason


class NoValuesError(SourceError):
    """A source answers and has no values now: nothing is wrong with its devices. It stays open and is asked again."""


class AttributionError(ExporterError):
    """The kubelet could not be asked, or its answer not be read. ``reason`` becomes a label value."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason apart from the words."""
        super().__init__(message)
        self.reason = reason


class StateError(ExporterError):
    """The state file could not be read or written. ``reason`` becomes a label value."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason apart from the words."""
        super().__init__(message)
        self.reason = reason


class ApiError(ExporterError):
    """The Kubernetes API could not be asked, or its answer not be read. ``reason`` becomes a label value.

    ``status`` is the HTTP status where there was an answer, ``retry_after_seconds`` what it asked us to wait.
    """

    def __init__(
        self, reason: str, message: str, *, status: int | None = None, retry_after_seconds: float | None = None
    ) -> None:
        """Keep apart what is acted on."""
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class PrometheusError(ExporterError):
    """Prometheus, or what speaks its API, could not be asked, or its answer not be read. ``reason`` is snake case.

    ``retriable`` tells whether the same question may be answered later: a timeout, a 503, a broken connection.
    """

    def __init__(self, reason: str, message: str, *, retriable: bool = False) -> None:
        """Keep apart what is acted on."""
        super().__init__(message)
        self.reason = reason
        self.retriable = retriable


class StoreError(ExporterError):
    """The store of closed days could not be opened, read or written. ``reason`` is snake case."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason apart from the words."""
        super().__init__(message)
        self.reason = reason
