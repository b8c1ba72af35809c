"""Single objects of the Kubernetes API, read by name when they are first wanted and again every so often."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from exporter.attribution.api_client import METADATA_WATCH, PLAIN, ApiClient
from exporter.errors import ApiError

REFUSED_SECONDS = 300.0
"""Rights change by hand, and thousands of nodes may lack the same one."""
TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""For so long something is held back for an answer that does not come."""

_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 60.0
_LONGEST_SLEEP_SECONDS = 3600.0
# Errors of one object; any other is one of the server or of the way to it, and the next object would meet it too.
_OWN_REASONS = frozenset({"forbidden", "not_found", "garbage", "too_large"})

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def _no_query(_key: Hashable) -> Mapping[str, str]:
    return {}


@dataclass(slots=True)
class _State:
    """What is known of one key beside its item."""

    due_seconds: float = 0.0
    """Of the event loop's time."""
    asked_at: float | None = None
    """Of ``steady``, the first time."""
    unready: int = 0
    """How often it was there and not as it will be."""
    refusal: ApiError | None = None
    """Why this key alone cannot be read."""


class Lookups(Generic[Key, Item]):
    """Keeps what was read of each wanted key.

    Args:
        client: Of the API.
        path: Of a key's object.
        parse: Reads it; ``None`` for an object that is not yet what it will be.
        steady: Seconds of a monotonic clock.
        random: 0..1.
        query: Of a key's object, for one that is found by a list.
        renew_seconds: After which an object is read again, give or take a fifth; ``None`` for those that do not change.
        whole: Whether the object is needed, and not its metadata alone; a node's is a hundred times that.
        absent_is_problem: Whether it has to be told that an object does not exist.
        refused_seconds: After which what was refused is asked for again.
    """

    def __init__(  # noqa: PLR0913 - how to ask, how to read, how often
        self,
        client: ApiClient,
        *,
        path: Callable[[Key], str],
        parse: Callable[[Key, dict[str, Any]], Item | None],
        steady: Callable[[], float],
        random: Callable[[], float],
        query: Callable[[Key], Mapping[str, str]] = _no_query,
        renew_seconds: float | None = 600.0,
        whole: bool = False,
        absent_is_problem: bool = False,
        refused_seconds: float = REFUSED_SECONDS,
    ) -> None:
        self._client = client
        self._path = path
        self._parse = parse
        self._query = query
        self._steady = steady
        self._random = random
        self._renew_seconds = renew_seconds
        self._accept = PLAIN if whole else METADATA_WATCH
        self._absent_is_problem = absent_is_problem
        self._refused_seconds = refused_seconds
        self._states: dict[Key, _State] = {}
        self._failures = 0
        self._wake = asyncio.Event()
        self._outage: ApiError | None = None
        self.items: Mapping[Key, Item] = {}
        """Replaced, not mutated, when something changes."""
        self.errors: Counter[str] = Counter()

    @property
    def problem(self) -> ApiError | None:
        """What keeps wanted objects from being read; ``None`` when all is well."""
        if self._outage:
            return self._outage
        refusals = (state.refusal for state in self._states.values() if state.refusal)
        return next((one for one in refusals if self._absent_is_problem or one.reason != "not_found"), None)

    def want(self, key: Key) -> None:
        """Have a key read, now if it never was."""
        if key not in self._states:
            self._states[key] = _State(asked_at=self._steady() if self._outage else None)
            self._wake.set()

    def keep(self, keys: Iterable[Key]) -> None:
        """Want these keys and forget all others."""
        wanted = dict.fromkeys(keys)
        for key in wanted:
            self.want(key)
        if len(wanted) < len(self._states):
            self._states = {key: state for key, state in self._states.items() if key in wanted}
            self.items = {key: item for key, item in self.items.items() if key in wanted}

    def retry_absent(self) -> None:
        """Ask again, now, for every key that was not found."""
        for state in self._states.values():
            if state.refusal is not None and state.refusal.reason == "not_found":
                state.due_seconds = 0.0
        self._wake.set()

    def given_up(self, key: Key) -> bool:
        """Tell whether nothing should wait any more for a wanted key that has no item."""
        state = self._states.get(key)
        if state is None or key in self.items:
            return False
        return state.refusal is not None or (
            state.asked_at is not None and self._steady() - state.asked_at >= PATIENCE_SECONDS
        )

    async def run(self) -> None:
        """Read until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            pause_seconds = await self._read_due(loop.time)
            if pause_seconds is not None:
                await asyncio.sleep(pause_seconds)
                continue
            due_seconds = min((state.due_seconds for state in self._states.values()), default=float("inf"))
            pause_seconds = min(max(due_seconds - loop.time(), 0.0), _LONGEST_SLEEP_SECONDS)
            # Not wait_for: before Python 3.12 it can swallow a cancellation that comes together with the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._wake.wait()

    async def _read_due(self, loop_time: Callable[[], float]) -> float | None:
        """Read what is due; give the seconds to leave the server in peace if it cannot be had."""
        for key, state in list(self._states.items()):
            if state.due_seconds > loop_time() or self._states.get(key) is not state:
                continue
            self._asked(state)
            try:
                answer = await self._client.get(
                    self._path(key), self._query(key), accept=self._accept, timeout_seconds=TIMEOUT_SECONDS
                )
            except ApiError as error:
                self.errors[error.reason] += 1
                if error.reason not in _OWN_REASONS:
                    self._failures += 1
                    self._outage = error
                    for other in self._states.values():
                        self._asked(other)
                    return self._client.retry_seconds(error, self._failures)
                self._refused(key, state, error)
                state.due_seconds = loop_time() + self._refused_seconds * self._jitter()
            else:
                state.due_seconds = loop_time() + self._answered(key, state, answer)
            self._failures = 0
            self._outage = None
        return None

    def _asked(self, state: _State) -> None:
        if state.asked_at is None:
            state.asked_at = self._steady()

    def _refused(self, key: Key, state: _State, error: ApiError) -> None:
        state.refusal = error
        if error.reason == "not_found" and key in self.items:
            self.items = {other: item for other, item in self.items.items() if other != key}

    def _answered(self, key: Key, state: _State, answer: dict[str, Any]) -> float:
        """Keep an answer; give the seconds until the next one is wanted."""
        state.refusal = None
        item = self._parse(key, answer)
        if item is None:
            state.unready += 1
            return min(_FIRST_RETRY_SECONDS * 2.0 ** min(state.unready - 1, 10), _LONGEST_RETRY_SECONDS)
        if key in self._states and (key not in self.items or self.items[key] != item):
            self.items = {**self.items, key: item}
        return float("inf") if self._renew_seconds is None else self._renew_seconds * self._jitter()

    def _jitter(self) -> float:
        return 0.8 + 0.4 * self._random()
