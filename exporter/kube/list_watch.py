"""Keeps a map of Kubernetes objects up to date by list and watch, and caches single objects."""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

from exporter.errors import ApiError
from exporter.kube.api_client import METADATA_LIST, METADATA_WATCH, OPENED, PLAIN, ApiClient, Request

LOG = logging.getLogger("exporter.kube.list_watch")

Item = TypeVar("Item")
ObjectKey = tuple[str, str]
"""Namespace and name."""

TEXT_LIMIT = 4096
"""Maximum length of a value in characters; longer values are cut."""
NAME_LIMIT = 253
"""Maximum length of a name in characters, as in the API."""
SILENCE_SECONDS = 150.0
"""Silence after which a watch is renewed. A server sends no bookmark without a change; a new watch is cheap."""
INCOMPLETE = "incomplete"
"""Reason of a list that lacks the canary."""
SHORTEST_WATCH_SECONDS = 1.0
"""Minimum duration of a watch without an event; a shorter one is a failure, so a broken proxy causes a backoff."""
LIST_SECONDS = 30.0
SKEW_SECONDS = 10.0
"""Tolerated difference of clocks; a smaller difference hardly changes the ends of opt-outs and tokens."""
GONE_SPREAD_SECONDS = 10.0
"""Jitter after a server has lost its history, because it ends all watches at once and all agents list again."""
_LIST_AGAIN_AFTER = 5
# Reasons of failures that the last resource version may cause, or after which it may no longer advance.
_DOUBTFUL = frozenset({"server_error", "timeout"})
_BROKEN = frozenset({"garbage", "forbidden", "not_found", "too_large", "unexpected"})


@dataclass(kw_only=True, eq=False)
class ListWatch(Generic[Item]):
    """Follows the objects of one list with one watch connection.

    ``items`` is replaced, not mutated, so readers may keep it. An object leaves ``items`` after an event, or when a
    complete list lacks it.
    """

    client: ApiClient
    path: str
    """Path of the list, such as ``/api/v1/pods``; can be changed later to another version of the API."""
    query: Mapping[str, str]
    """Query parameters with selectors."""
    metadata_only: bool
    """Whether to request only metadata; a server may still return whole objects."""
    parse: Callable[[dict[str, Any]], Item | None]
    """Returns the item of an object, or ``None`` to ignore the object. It may raise LookupError, TypeError, ValueError
    or AttributeError: the object is then skipped."""
    clock: Callable[[], float]
    """Returns Unix time."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    lifetime_seconds: tuple[float, float] = (240, 480)
    """Shortest and longest time after which a watch is renewed."""
    silence_seconds: float = SILENCE_SECONDS
    """Time without an event after which a watch is renewed."""
    keep_seconds: float = math.inf
    """Time for which ``known`` stays true after the stream was lost."""
    canary: ObjectKey | None = None
    """Object that every complete list contains; a list without it is a failure. ``None``: no such check."""
    canary_fix: str = ""
    """Fix for a missing canary, for the message."""

    errors: Counter[str] = field(default_factory=Counter)
    """Counts by reason since the start; ``unparsable`` counts skipped objects."""
    items: Mapping[ObjectKey, Item] = field(default_factory=dict)
    at_seconds: float | None = None
    """Unix time of the last answer or event."""
    failure: ApiError | None = None
    """Last error; ``None`` while the stream is open."""
    answered: bool = False
    """Whether the watch has been opened, or a request has failed."""
    skew_seconds: float = 0.0
    """Seconds by which this clock was ahead of the server's at the last answer; 0 if negligible."""
    _resource_version: str = ""
    _newest: str = ""
    _failures: int = 0
    _expiries: int = 0
    _lost_at: float | None = None

    @property
    def known(self) -> bool:
        """Whether ``items`` is valid: the list was read, and the stream is lost for at most ``keep_seconds``."""
        lost = self._lost_at
        return self.at_seconds is not None and (lost is None or self.clock() - lost <= self.keep_seconds)

    @property
    def problem(self) -> str:
        """Failure in one line; empty while the stream is open."""
        return str(self.failure or "")

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
            except ApiError as error:
                await self.sleep(self._note(error))
            except Exception as error:
                # An unexpected object must not end the agent, which also meters without the API.
                LOG.exception("%s: unexpected; listed again later", self.path)
                words = f"list {self.path}: unexpected {type(error).__name__}; the agent's log has the cause"
                await self.sleep(self._note(ApiError("unexpected", words)))

    def _note(self, error: ApiError) -> float:
        """Record a failure and return the wait in seconds."""
        self.errors[error.reason] += 1
        self._failures += 1
        if self._lost_at is None:
            self._lost_at = self.clock()
        if error.reason == "gone":
            self._resource_version = ""
            self._expiries += 1
            if self._expiries == 1:
                return GONE_SPREAD_SECONDS * self.client.random()
        elif error.reason in _BROKEN or (error.reason in _DOUBTFUL and self._failures % _LIST_AGAIN_AFTER == 0):
            self._resource_version = ""
        self.failure, self.answered = error, True
        return self.client.retry_seconds(error, self._failures)

    async def _list(self) -> None:
        # The cache of any server is sufficient, unless it is older than a known version or too old for a watch.
        behind = self._expiries > 1
        listed = await self._get({} if behind else {"resourceVersion": "0"})
        if not behind and (_older(_version(listed), self._newest) or not self._has_canary(listed)):
            listed = await self._get({})
        if not self._has_canary(listed):
            count = len(listed["items"] or ())
            own = "/".join(self.canary or ())
            words = f"{own}, the pod of this agent, is not among the {count} objects; {self.canary_fix}"
            raise ApiError(INCOMPLETE, f"list {self.path} at {self.client.address}: {words}")
        found: dict[ObjectKey, Item] = {}
        for each in listed["items"] or ():  # Go's empty list is null
            self._take(each, found)
        self._compare_clocks()
        self._at(_version(listed))
        self._replace(found)

    def _has_canary(self, listed: Mapping[str, Any]) -> bool:
        return self.canary is None or any(key_of(each) == self.canary for each in listed["items"] or ())

    async def _get(self, query: Mapping[str, str]) -> dict[str, Any]:
        accept = METADATA_LIST if self.metadata_only else PLAIN
        request = Request(self.path, {**self.query, **query}, accept)
        listed = await self.client.get(request, timeout_seconds=LIST_SECONDS)
        if not isinstance(listed.get("items", 0), list | None) or not _version(listed):
            raise ApiError("garbage", f"list {self.path} at {self.client.address}: the answer is not an object list")
        return listed

    async def _watch(self) -> None:
        shortest, longest = self.lifetime_seconds
        query = {
            **self.query,
            "resourceVersion": self._resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(round(shortest + (longest - shortest) * self.client.random()), 1)),
        }
        request = Request(self.path, query, METADATA_WATCH if self.metadata_only else PLAIN)
        began, had_event = self.clock(), False
        stream = self.client.watch(request, silence_seconds=self.silence_seconds)
        async with aclosing(stream) as events:
            async for event in events:
                if event["type"] == OPENED:
                    self._lost_at = self.failure = None
                    self.answered = True
                    self._compare_clocks()
                    self._at(self._resource_version)
                else:
                    had_event = True
                    self._apply(event["type"], event["object"])
                    self._failures = self._expiries = 0
        lasted = self.clock() - began
        if not had_event and 0 <= lasted < SHORTEST_WATCH_SECONDS:
            raise ApiError(
                "short_watch",
                f"watch {self.path} at {self.client.address}: the stream ended at once without an event;"
                " check whether a proxy before the server cuts long answers",
            )
        self._failures = self._expiries = 0

    def _compare_clocks(self) -> None:
        try:
            skew_seconds = self.clock() - parsedate_to_datetime(self.client.date).timestamp()
        except ValueError:  # a proxy may omit the date
            return
        if abs(skew_seconds) <= SKEW_SECONDS:
            skew_seconds = 0.0
        elif not self.skew_seconds:
            self.errors["clock_skew"] += 1
        self.skew_seconds = skew_seconds

    def _at(self, version: str) -> None:
        """Record the time and the version of an answer or event."""
        self.at_seconds = self.clock()
        if version:
            self._resource_version = version
            if not _older(version, self._newest):
                self._newest = version

    def _apply(self, kind: object, shown: dict[str, Any]) -> None:
        if kind in {"ADDED", "MODIFIED"}:
            items = dict(self.items)
            self._take(shown, items)
            self._replace(items)
        elif kind == "DELETED":
            self._replace({key: item for key, item in self.items.items() if key != key_of(shown)})
        self._at(_version(shown))

    def _take(self, shown: Any, items: dict[ObjectKey, Item]) -> None:  # noqa: ANN401 - JSON
        """Add an object to ``items``; if it cannot be parsed, keep its earlier item."""
        key = key_of(shown)
        try:
            parsed = self.parse(shown)
        except (LookupError, TypeError, ValueError, AttributeError):
            self.errors["unparsable"] += 1
            parsed = self.items.get(key)
        if parsed is not None:
            items[key] = parsed
        else:
            items.pop(key, None)

    def _replace(self, items: dict[ObjectKey, Item]) -> None:
        if items != self.items:
            self.items = items


def mapping_at(value: object, *path: str) -> Mapping[str, Any]:
    """Return the JSON object at a path of keys; an empty mapping without one."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def text_of(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return a JSON value as encodable text, cut to a limit; empty if it is not a scalar."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        return ""
    # JSON can contain a lone surrogate, which no encoder accepts.
    return value[:limit].encode(errors="replace").decode()


def key_of(shown: object) -> ObjectKey:
    """Return namespace and name of an object; a missing part is empty."""
    metadata = mapping_at(shown, "metadata")
    return text_of(metadata.get("namespace"), NAME_LIMIT), text_of(metadata.get("name"), NAME_LIMIT)


def _version(shown: object) -> str:
    version = mapping_at(shown, "metadata").get("resourceVersion")
    return version if isinstance(version, str) else ""


def _older(version: str, than: str) -> bool:
    """Return whether a version is older. All known servers use numbers; other versions are not compared."""
    if not (version.isdecimal() and than.isdecimal() and version.isascii() and than.isascii()):
        return False
    one, other = version.lstrip("0"), than.lstrip("0")
    return (len(one), one) < (len(other), other)  # int() refuses numbers with thousands of digits


REFUSED_SECONDS = 300.0
"""Wait after a refusal. Permissions are changed by hand, and thousands of nodes may lack the same permission."""
TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""Maximum time for which callers wait for an answer."""

_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 60.0
# Reasons of errors of one object; other errors are of the server or the connection and affect all objects.
_OWN_REASONS = frozenset({"forbidden", "not_found", "garbage", "too_large"})

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _State:
    """State of one key in addition to its item."""

    due_seconds: float = 0.0
    """Time of the next request, on the clock of the event loop."""
    asked_at: float | None = None
    """Time of the first request, on ``steady``."""
    unready: int = 0
    """Number of answers with an object that was not ready yet."""
    refusal: ApiError | None = None
    """Error for which only this key cannot be read; ``None`` without one."""


@dataclass(kw_only=True, eq=False)
class Lookups(Generic[Key, Item]):
    """Reads an object for each wanted key, and stores the results."""

    client: ApiClient
    request: Callable[[Key], Request]
    """Returns the request for a key's object, or for a list that contains it."""
    parse: Callable[[Key, dict[str, Any]], Item | None]
    """Parses the answer; ``None`` for an object that is not ready yet."""
    steady: Callable[[], float]
    """Returns seconds of a monotonic clock."""
    renew_seconds: float | None = 600.0
    """Time after which an object is read again, plus or minus 20 %; ``None`` for constant objects."""
    absent_is_problem: bool = False
    """Whether an object that is not found is a problem."""
    refused_seconds: float = REFUSED_SECONDS
    """Time after which a refused request is repeated."""

    items: Mapping[Key, Item] = field(default_factory=dict)
    """Items by key; the mapping is replaced, not mutated, after a change."""
    errors: Counter[str] = field(default_factory=Counter)
    _states: dict[Key, _State] = field(default_factory=dict)
    _failures: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _outage: ApiError | None = None

    @property
    def problem(self) -> ApiError | None:
        """Error that prevents the read of wanted objects; ``None`` without a problem."""
        if self._outage:
            return self._outage
        refusals = (state.refusal for state in self._states.values() if state.refusal)
        return next((one for one in refusals if self.absent_is_problem or one.reason != "not_found"), None)

    @property
    def answered(self) -> bool:
        """Whether each wanted key was read at least once, or cannot be read now."""
        states = self._states.items()
        return self._outage is not None or all(key in self.items or one.refusal or one.unready for key, one in states)

    def want(self, key: Key) -> None:
        """Add a wanted key; a new key is read at once."""
        if key not in self._states:
            self._states[key] = _State(asked_at=self.steady() if self._outage else None)
            self._wake.set()

    def keep(self, keys: Iterable[Key]) -> None:
        """Set the wanted keys; drop all others."""
        wanted = dict.fromkeys(keys)
        for key in wanted:
            self.want(key)
        if len(wanted) < len(self._states):
            self._states = {key: state for key, state in self._states.items() if key in wanted}
            self.items = {key: item for key, item in self.items.items() if key in wanted}

    def retry_absent(self) -> None:
        """Read all keys that were not found again now."""
        for state in self._states.values():
            if state.refusal is not None and state.refusal.reason == "not_found":
                state.due_seconds = 0.0
        self._wake.set()

    def given_up(self, key: Key) -> bool:
        """Return whether callers should no longer wait for a wanted key without an item."""
        state = self._states.get(key)
        if state is None or key in self.items:
            return False
        return state.refusal is not None or (
            state.asked_at is not None and self.steady() - state.asked_at >= PATIENCE_SECONDS
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
            due_seconds = min((state.due_seconds for state in self._states.values()), default=math.inf)
            # Not wait_for: before Python 3.12, it can lose a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_seconds):
                    await self._wake.wait()

    async def _read_due(self, loop_time: Callable[[], float]) -> float | None:
        """Read the due keys; return the seconds to wait if the server cannot be reached."""
        for key, state in list(self._states.items()):
            if state.due_seconds > loop_time() or self._states.get(key) is not state:
                continue
            self._asked(state)
            try:
                answer = await self.client.get(self.request(key), timeout_seconds=TIMEOUT_SECONDS)
            except ApiError as error:
                self.errors[error.reason] += 1
                if error.reason not in _OWN_REASONS:
                    self._failures += 1
                    self._outage = error
                    for other in self._states.values():
                        self._asked(other)
                    return self.client.retry_seconds(error, self._failures)
                state.refusal = error
                if error.reason == "not_found" and key in self.items:
                    self.items = {other: item for other, item in self.items.items() if other != key}
                state.due_seconds = loop_time() + self.refused_seconds * self._jitter()
            else:
                state.due_seconds = loop_time() + self._answered(key, state, answer)
            self._failures = 0
            self._outage = None
        return None

    def _asked(self, state: _State) -> None:
        if state.asked_at is None:
            state.asked_at = self.steady()

    def _answered(self, key: Key, state: _State, answer: dict[str, Any]) -> float:
        """Store an answer; return the seconds until the next request."""
        state.refusal = None
        item = self.parse(key, answer)
        if item is None:
            state.unready += 1
            return min(_FIRST_RETRY_SECONDS * 2.0 ** min(state.unready - 1, 10), _LONGEST_RETRY_SECONDS)
        if key in self._states and (key not in self.items or self.items[key] != item):
            self.items = {**self.items, key: item}
        return math.inf if self.renew_seconds is None else self.renew_seconds * self._jitter()

    def _jitter(self) -> float:
        return 0.8 + 0.4 * self.client.random()
