"""State of the simulated host engine: connections, groups, watches, faults, injected errors, how calls are declared."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from exporter.gpu.dcgm import library
from gpu_simulator import dcgm_known
from gpu_simulator.dcgm_cache import Cache, Key
from gpu_simulator.dcgm_entities import Entities
from gpu_simulator.driver_core import CArgument, out, plain
from gpu_simulator.truth import Fault, NodeTruth

HOST = "localhost"
PORT = 5555
"""Where the engine listens, and nowhere else."""

UNINITIALIZED = -10
MOST_GROUPS = 61
MOST_FIELD_GROUPS = 60
MOST_ENTITIES = 1024
_HANG_POLL_SECONDS = 0.05
_FIRST_HANDLE = 0x7F00_0000_1000
"""Above 2^32, so that a truncated handle shows."""


class Refused(Exception):  # noqa: N818 - control flow inside the engine, becomes a return code and never leaves it
    """A call that does not succeed; ``code`` is the dcgmReturn_t."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class EngineKilledError(AssertionError):
    """A call that kills a real host engine, for everybody on the node; no program of ours may ever make it."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """A group's field group being sampled; by entity and field."""

    keys: tuple[Key, ...]


@dataclass(slots=True, kw_only=True)
class Connection:
    """What one client has: groups of entities, groups of fields, watches; all gone with the connection."""

    embedded: bool = False
    alive: bool = True
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    field_groups: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    watches: dict[tuple[int, int], Watch] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Failure:
    """An error that a test asked for."""

    code: int
    field_id: int | None
    times: int | None


@dataclass(slots=True, kw_only=True)
class Engine:
    """The library of this process and the engine behind it; ``monotonic`` is the beat of the watches."""

    source: Callable[[], NodeTruth]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    cache_seconds: float
    epoch_seconds: float
    library_major: int
    references: int = 0
    connections: dict[int, Connection] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)
    entities: Entities = field(default_factory=Entities)
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    profiled: bool = False
    """Whether anybody asked for a profiling field yet: the module is loaded when it is needed."""
    _next_handle: int = _FIRST_HANDLE
    _known: NodeTruth | None = None
    _known_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """The truth, at most ``cache_seconds`` old unless ``fresh``; entities follow it."""
        moment = self.monotonic()
        if fresh or self._known is None or moment - self._known_at >= self.cache_seconds:
            self._known, self._known_at = self.source(), moment
            self.entities.follow(self._known)
        return self._known

    @property
    def version(self) -> dcgm_known.Version:
        """Of the engine."""
        return dcgm_known.parse(self.now().dcgm.version)

    def new_handle(self) -> int:
        """A number that was never given out before."""
        self._next_handle += 0x10
        return self._next_handle

    def gate(self) -> NodeTruth:
        """Wait as long as the engine hangs or is slow; note when it is down."""
        node = self.now()
        while Fault.ENGINE_HANG in node.faults:
            self.sleep(_HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        if Fault.ENGINE_DOWN in node.faults:
            self.kill()
        elif seconds := node.faults.get(Fault.ENGINE_SLOW):
            self.sleep(seconds)
        return node

    def kill(self) -> None:
        """End the engine: whatever it kept is gone, and connections to it stay dead."""
        self.cache.clear()
        self.profiled = False
        for connection in self.connections.values():
            if not connection.embedded:
                connection.alive = False
                connection.groups.clear()
                connection.field_groups.clear()
                connection.watches.clear()

    def connection(self, handle: CArgument) -> Connection:
        """The living connection behind a handle."""
        found = self.connections.get(plain(handle))
        if found is None or not found.alive:
            raise Refused(library.CONNECTION_GONE)
        return found

    def refuse_injected(self, name: str, field_ids: Iterable[int] = ()) -> None:
        """Refuse where a test asked for it: the whole call, or one that has a certain field."""
        ids = frozenset(field_ids)
        for failure in self.failures.get(name, ()):
            if failure.times == 0 or (failure.field_id is not None and failure.field_id not in ids):
                continue
            if failure.times is not None:
                failure.times -= 1
            raise Refused(failure.code)


Call = Callable[[Engine, tuple[CArgument, ...]], None]
"""One C function: fills its out-arguments or raises ``Refused``."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The C functions of one subject, by symbol."""

    by_name: dict[str, Call] = field(default_factory=dict)

    def library(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Declare a function that needs no engine: ``handler(engine, *arguments)``."""

        def declare(handler: Callable[..., None]) -> Callable[..., None]:
            def call(engine: Engine, arguments: tuple[CArgument, ...]) -> None:
                engine.refuse_injected(name)
                handler(engine, *arguments)

            self.by_name[name] = call
            return handler

        return declare

    def engine(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Declare a function of a connection: ``handler(engine, connection, *arguments)``."""

        def declare(handler: Callable[..., None]) -> Callable[..., None]:
            def call(engine: Engine, arguments: tuple[CArgument, ...]) -> None:
                if engine.references == 0:
                    raise Refused(UNINITIALIZED)
                engine.gate()
                connection = engine.connection(arguments[0])
                engine.refuse_injected(name)
                handler(engine, connection, *arguments[1:])

            self.by_name[name] = call
            return handler

        return declare


def check_version(struct: CArgument) -> None:
    """Refuse a struct whose version word is not that of its layout."""
    struct = out(struct)
    if struct.version != library.version_word(type(struct)):
        raise Refused(library.VERSION_MISMATCH)
