"""Decides when the driver is opened anew because it does not name a GPU that was seen or that the kubelet has."""

FIRST_SECONDS = 60.0
LONGEST_SECONDS = 600.0


class MissingGpus:
    """How long GPUs have been missing from a driver that works.

    The driver fixes its list of devices when it is opened. A GPU that was away at that moment is not in the list when
    it is back, and a child that was started meanwhile does not even know that there is one to be looked for.

    Args:
        first_seconds: How long a GPU is missing before the driver is opened anew. Doubles, up to ``longest_seconds``,
            while that does not bring it back, for all other GPUs miss a sample each time.
        longest_seconds: See there.
    """

    def __init__(self, *, first_seconds: float = FIRST_SECONDS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._first_seconds = self._pause_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._since: float | None = None

    def is_due(self, *, expected: int | None, named: int | None, steady: float) -> bool:
        """Tell whether the driver is to be opened anew now; the next pause begins with that.

        Args:
            expected: GPUs that should be here; ``None`` where nobody knows.
            named: GPUs that the driver's newest reading names, whatever their condition; ``None`` while the driver does
                not answer, which says nothing of what it would name.
            steady: Seconds of a clock that nobody sets.
        """
        if named is None:
            return False
        if expected is None or named >= expected:
            self._since, self._pause_seconds = None, self._first_seconds
            return False
        if self._since is None:
            self._since = steady
        if steady - self._since < self._pause_seconds:
            return False
        self._since = steady
        self._pause_seconds = min(2 * self._pause_seconds, self._longest_seconds)
        return True
