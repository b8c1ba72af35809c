"""Fuzz targets: each entry point for foreign input in which fuzzing found faults, and the conditions on its answer.

Hypothesis has strategies for the others: the kubelet's answers, cgroups, device ids, collectors, DCGM's values, the
store, and Kubernetes objects, next to their tests.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz_page import NOW, BrokenPromise, lived, node_in, require, require_finite, require_json, save_now
from yarl import URL

from exporter.accounting.ledger import ledger_of
from exporter.accounting.state_file import VERSION, StateFile, encode, to_json
from exporter.agent.history import EventLog, SourceRecord
from exporter.attribution.owner_rules import OwnerRules, wanted_annotations
from exporter.config import web_config
from exporter.config.prometheus_options import PrometheusSettings
from exporter.config.resolve import load_agent
from exporter.cost import agent_client, node_report
from exporter.cost import budgets as budget_file
from exporter.cost import report as costs
from exporter.cost.dimensions import Filters, LineKey
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.ledger import Figures
from exporter.cost.live import live_pods
from exporter.cost.prometheus import PrometheusAnswer, PrometheusClient
from exporter.cost.render import FLEET_FORMATS, write_fleet
from exporter.cost.window import Now, Window
from exporter.errors import ApiError, ConfigError, ExporterError, PrometheusError, SourceError
from exporter.gpu import wire
from exporter.kube import metadata
from exporter.kube.api_client import ApiClient
from exporter.kube.credentials import Credentials
from exporter.kube.list_watch import ListWatch
from exporter.model.attribution import PodMetadata
from exporter.model.devices import Reading
from exporter.service import opencost_query, parameters
from exporter.service.page_frame import read_view
from gpu_simulator import scenario

CORPORA = Path(__file__).resolve().parent.parent / "tests" / "corpora"
LONGEST_MESSAGE = 20_000
Run = Callable[[bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An entry point: ``run`` passes bytes as the product does, and raises an exception for a finding."""

    family: str
    name: str
    run: Run
    allowed: tuple[type[Exception], ...]
    """Exceptions that the entry point documents."""
    most_bytes: int

    @property
    def path(self) -> str:
        """Return ``family/name``."""
        return f"{self.family}/{self.name}"

    @property
    def seeds(self) -> Path:
        """Return the folder of the kept inputs of its family."""
        return CORPORA / self.family

    def inputs(self) -> list[Path]:
        """Return its kept inputs."""
        return sorted(self.seeds.glob(f"{self.name}.*"))


TARGETS: dict[str, Target] = {}
"""Targets by path."""


def target(family: str, name: str, *allowed: type[Exception], most_bytes: int = 4096) -> Callable[[Run], Run]:
    """Register a function as a target."""

    def enter(run: Run) -> Run:
        one = Target(family=family, name=name, run=run, allowed=allowed, most_bytes=most_bytes)
        TARGETS[one.path] = one
        return run

    return enter


class Scratch:
    """A folder for the files that entry points read."""

    directory: Path | None = None
    """Folder that a test sets; otherwise created at the first use."""

    @classmethod
    def folder(cls) -> Path:
        """Return the folder."""
        if cls.directory is None:
            cls.directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
        return cls.directory

    @classmethod
    def file(cls, name: str, content: bytes) -> Path:
        """Write a file and return it."""
        path = cls.folder() / name
        path.write_bytes(content)
        return path


class _Unexpected(logging.Handler):
    """Keeps exceptions that the product catches as a last resort to continue: their input is a finding."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and self.error is None:
            self.error = record.exc_info[1]


UNEXPECTED = _Unexpected()


def quiet() -> None:
    """Log nothing, but keep records with an exception."""
    root = logging.getLogger()
    root.handlers = [UNEXPECTED]
    root.setLevel(logging.ERROR)


def run(one: Target, data: bytes) -> None:
    """Pass an input to a target; raise an exception for a finding."""
    UNEXPECTED.error = None
    try:
        one.run(data)
    except one.allowed as refused:
        check_message(refused)
    if UNEXPECTED.error is not None:
        raise UNEXPECTED.error


def check_message(error: Exception) -> None:
    """Require that a message can be written to a terminal and a log as lines of text."""
    for line in getattr(error, "problems", (str(error),)):
        require(bool(line.strip()), "an error without words")
        require(len(line) < LONGEST_MESSAGE, f"a message of {len(line)} characters")


# ---- wire: lines of a child process


@target("wire", "page", SourceError, most_bytes=8192)
def _page(data: bytes) -> None:
    """Convert a line of a child to a page."""
    message = wire.decode(data)
    world, agent = node_in(Scratch.folder() / "wire")
    if isinstance(message, Reading):
        EventLog().add(SourceRecord().add(message), None, 0.0)
        lived(world, agent, odd=message.gpus)
    else:
        agent.pipe.status = message
        lived(world, agent)
    agent.end()
    StateFile(Scratch.folder() / "wire" / "state").path.unlink(missing_ok=True)


# ---- yaml: files from people and programs


@target("yaml", "config", ConfigError)
def _config(data: bytes) -> None:
    path = Scratch.file("config.yaml", data)
    load_agent({"config": str(path)}, {}, check_paths=False)


@target("yaml", "web", ConfigError)
def _web(data: bytes) -> None:
    found = web_config.load(Scratch.file("web.yaml", data))
    for name, value in found.headers.items():
        require((name + value).isascii() and (name + value).isprintable(), f"the header {name}: {value!r}")
    require(all(":" not in user for user in found.users), "a user with a colon")


@target("yaml", "budgets", ConfigError)
def _budgets(data: bytes) -> None:
    for budget in budget_file.load(Scratch.file("budgets.yaml", data)):
        require_finite((budget.amount, *budget.thresholds), "an amount", least=0.0)


@target("yaml", "scenario", ConfigError)
def _scenario(data: bytes) -> None:
    found = scenario.load(str(Scratch.file("scenario.yaml", data)))
    for seconds in (0.0, 61.5, 86_400.0):
        for gpu in found.at(seconds).gpus:
            require_finite((gpu.power_watts,), "a power", least=0.0)


# ---- state: the file of the ledger, from this release or another, or damaged by the disk


def _folder() -> Path:
    folder = Scratch.folder() / "node" / "state"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


@target("state", "content", most_bytes=8192)
def _content(data: bytes) -> None:
    """Read content under a correct checksum: from another release, or edited by hand."""
    folder = _folder()
    file = written(folder, data)
    as_read = file.path.read_bytes()
    world, agent = node_in(folder.parent, since=20.0)
    lived(world, agent, conserved=False)
    save_now(agent.metering, NOW + 30, 30.0)
    agent.end()
    require("kept as" in (agent.metering.problem or "kept as"), f"not saved: {agent.metering.problem}")
    if file.path.read_bytes() != as_read:  # otherwise nothing was metered, and there was nothing to save
        _reread(folder)


def written(folder: Path, state: bytes) -> StateFile:
    """Return a file with this state and a correct checksum."""
    checksum = hashlib.sha256(b"%d\n" % VERSION + state).hexdigest().encode()
    file = StateFile(folder)
    file.path.write_bytes(b'{"version":%d,"sha256":"%b","state":%b}\n' % (VERSION, checksum, state))
    return file


def _reread(folder: Path) -> None:
    """Check that the saved state reads back unchanged."""
    saved = StateFile(folder).load()
    if saved is None:
        raise BrokenPromise("nothing was saved")
    for ledger in (saved["ledger"], *saved["former_ledgers"]):
        again = json.loads(to_json(ledger_of(ledger).dump()))
        require(again == ledger, "the ledger changed")


def state_of_a_node(folder: Path) -> bytes:
    """Return the state of a node, without version and checksum; ``folder`` is empty."""
    world, agent = node_in(folder)
    lived(world, agent)
    agent.end()
    return encode(StateFile(folder / "state").load() or {}).partition(b'"state":')[2].removesuffix(b"}\n")


# ---- api: lists and watches as from a Kubernetes API


_RULES = OwnerRules(
    team_keys=("team",), cost_labels=("app", "team"), exported_labels=("app",), exported_annotations=("cost-code",)
)
_WANTED = wanted_annotations(_RULES)


class _Over(BaseException):
    """All bodies have been read; no code may catch it."""


class _Content:
    """A body in two pieces, as from a network."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._lines = io.BytesIO(body)

    async def readline(self, *, max_line_length: int) -> bytes:
        """Return a line, which the size of the body limits."""
        return self._lines.readline(max_line_length)

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the pieces."""
        middle = len(self._body) // 2
        for piece in (self._body[:middle], self._body[middle:]):
            if piece:
                yield piece


class FedApi(ApiClient):
    """The client, with bodies in place of HTTP answers, one per request."""

    def __init__(self, bodies: list[bytes]) -> None:
        super().__init__(Credentials(environ={}, service_account=Scratch.folder()), random=lambda: 0.5)
        self._bodies = bodies
        self.date = "Sat, 21 Nov 2026 22:00:00 GMT"

    async def _answer(self, *_asked: object) -> Any:  # noqa: ANN401 - a substitute for a response
        if not self._bodies:
            raise _Over
        return SimpleNamespace(content=_Content(self._bodies.pop(0)), release=lambda: None, close=lambda: None)


async def _end(_seconds: float) -> None:
    raise _Over


async def followed(bodies: list[bytes]) -> ListWatch[PodMetadata]:
    """Return the pods after the answers of a server, until no answer is left."""
    pods: ListWatch[PodMetadata] = ListWatch(
        client=FedApi(bodies),
        path="/api/v1/pods",
        query={},
        metadata_only=True,
        parse=lambda item: metadata.parse_pod(item, _WANTED),
        clock=lambda: NOW,
        sleep=_end,
    )
    with contextlib.suppress(_Over):
        await pods.run()
    return pods


@target("api", "watch")
def _watch(data: bytes) -> None:
    """Read a list's body, the first line, and a watch's lines after it."""
    listed, _, events = data.partition(b"\n")
    pods = asyncio.run(followed([listed, events]))
    if pods.problem:
        check_message(ApiError("", pods.problem))


# ---- prometheus: answers over HTTP, and an agent's ledger


_SETTINGS = PrometheusSettings(url="http://prometheus:9090", retries=0)
_START = 1_790_812_800
WINDOW = Window(start_seconds=_START, end_seconds=_START + 86_400 + 3600, label="2026-10-01")
"""A day and an hour: needs a range query and an instant query, or two instant queries."""


class FedPrometheus(PrometheusClient):
    """The client, with bodies in place of HTTP answers, in turn."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_SETTINGS, random=lambda: 0.5)
        self._bodies = [line for line in data.split(b"\n") if line] or [b""]
        self._asked = 0

    async def _attempt(self, path: str, form: Mapping[str, str] | None) -> PrometheusAnswer:  # noqa: ARG002 - any question
        self._asked += 1
        return self._decoded(bytearray(self._bodies[(self._asked - 1) % len(self._bodies)]), {})


def _check(figures: Figures) -> None:
    require_finite((figures.unpriced_seconds, figures.energy_joules), "a figure", least=0.0)
    for amounts in (figures.seconds, *figures.money.values()):
        require_finite((value for _, value in amounts), "a figure by state", least=0.0)


@target("prometheus", "ledger", PrometheusError)
def _ledger(data: bytes) -> None:
    """Read bodies of answers, one per line, in turn, and write the result in every form."""
    ledger = asyncio.run(PrometheusLedger(FedPrometheus(data)).ledger(WINDOW, frozenset(LineKey._fields)))
    for chunk in ledger.chunks:
        require_finite(chunk.capacity_seconds.values(), "a capacity", least=0.0)
        require(all(0 <= hours <= chunk.window.hours for hours in chunk.recorded_hours.values()), "hours of a chunk")
        for figures in chunk.lines.values():
            _check(figures)
    found = costs.make_report(ledger, costs.Question(by=("namespace", "team")))
    _check(found.total)
    for form in FLEET_FORMATS:
        text = io.StringIO()
        write_fleet(found, form, text, with_notes=True)
        text.getvalue().encode()
        if form == "json":
            require_json(text.getvalue())


@target("prometheus", "series", PrometheusError)
def _series(data: bytes) -> None:
    """Decode instant queries, and read the pods of the live series."""

    async def ask() -> None:
        for sample in await FedPrometheus(data).instant("up", None):
            require_finite((sample.value,), "a sample")
        for pod in await live_pods(FedPrometheus(data), Filters(wanted={"namespace": frozenset({"a"})})):
            costs_of = (one["cost"] for one in pod.cost_per_hour)
            require_finite((pod.gpu_share_ratio, pod.activity_ratio, *costs_of), "a pod's value")

    asyncio.run(ask())


@target("prometheus", "agent", ExporterError, most_bytes=8192)
def _ledger_of_agent(data: bytes) -> None:
    """Read the body of an agent's answer to /api/v1/ledger."""
    document = agent_client.document_of(data, "http://node-a:9400")
    report = node_report.read(document, "http://node-a:9400")
    _check(report.report("owner").total)
    require_finite((report.capacity_seconds,), "capacity")
    for form in node_report.FORMATS:
        for by in node_report.BY:
            text = io.StringIO()
            node_report.write(report, form, text, by, with_notes=True)
            text.getvalue().encode()
            if form == "json":
                require_json(text.getvalue())


# ---- http: query strings


_TABLES = (
    (parameters.WINDOW, parameters.BY, *parameters.FILTERS, parameters.SHARE_IDLE, parameters.SHARE_UNALLOCATED),
    (parameters.WINDOW, parameters.SERIES, parameters.OFFSET, parameters.LIMIT),
    opencost_query.PARAMETERS,
)


@target("http", "query", ConfigError, most_bytes=1024)
def _query(data: bytes) -> None:
    """Pass a query string to every table of parameters and to the pages; raise the last refusal."""
    pairs = list(URL("/?" + data.decode("utf-8", "surrogateescape"), encoded=True).query.items())
    refused: ConfigError | None = None
    for table in _TABLES:
        try:
            values = parameters.read(table, pairs, Now(NOW))
            parameters.filters_of(values)
            if table is opencost_query.PARAMETERS:
                opencost_query.wanted_of(values)
                opencost_query.sets_of(values["window"], values)
        except ConfigError as error:
            refused = error
    try:
        view = read_view("/namespaces", pairs, Now(NOW))
        link = view.link(page=2)
        require(link.isascii() and " " not in link and '"' not in link, f"the link {link!r}")
        again = read_view("/namespaces", list(URL(link, encoded=True).query.items()), Now(NOW))
        require(again.question == view.question and again.window == view.window, f"{link!r} asks for something else")
    except ConfigError as error:
        refused = error
    if refused is not None:
        raise refused
