"""A node in virtual time and its agent: converts the accepted input of an entry point to a page, and checks it."""

import json
import math
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

from page_checks import parse
from virtual_node import Agent, Settings, start
from virtual_world import MODELS, Board, World

from exporter.config import price_book
from exporter.gpu import wire
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from exporter.model.devices import GpuReading
from exporter.model.snapshot import Snapshot
from exporter.web import node_api, node_page

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pipeline_support import save_now

NOW = 1_800_000_000.0
_TOLERATED = 1e-6


class BrokenPromise(Exception):  # noqa: N818 - its meaning
    """The answer of an entry point breaks its contract."""


def require(holds: bool, promise: str) -> None:  # noqa: FBT001 - as assert has it
    """Raise if a condition does not hold."""
    if not holds:
        raise BrokenPromise(promise)


def require_finite(values: Iterable[float | None], what: str, *, least: float = -math.inf) -> None:
    """Raise if a shown value is no number, or is below its minimum."""
    for value in values:
        if value is not None:
            require(math.isfinite(value) and value >= least, f"{what} is {value}")


def require_json(text: str | bytes) -> None:
    """Raise if a document is not JSON, or has a number that JSON does not allow."""

    def refuse(name: str) -> None:
        raise BrokenPromise(f"{name} in a document")

    json.loads(text, parse_constant=refuse)


def node_in(folder: Path, *, since: float = 0.0) -> tuple[World, Agent]:
    """Return a node of three GPUs (whole, shared, in two instances), each with a pod, and its agent, which starts now.

    Args:
        folder: Folder of the node; the agent's state is in ``state``, and stays from one node to the next.
        since: Monotonic time in seconds.
    """
    for name in ("proc", "pods"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    boards = [
        Board(index=0, serial=1, model=MODELS[0]),
        Board(index=1, serial=1, model=MODELS[0], replicas=2),
        Board(index=2, serial=1, model=MODELS[0], layout=("3g.40gb", "4g.40gb")),
    ]
    world = World(random=Random(1), boards=boards, directory=folder, churn=0.0, t=since)  # noqa: S311 - no secret
    for board in boards:
        world.start(board.units()[0], job="job", namespace="team-a")
    settings = Settings(directory=folder, with_api=False, save_seconds=0.0)
    return world, start(
        settings, world, price_book.load(None), boot_id="boot", clock=lambda: NOW + world.t, steady=since
    )


def lived(world: World, agent: Agent, *, odd: tuple[GpuReading, ...] | None = None, conserved: bool = True) -> Snapshot:
    """Run an agent for three samples, end it and check its page.

    Args:
        world: The node.
        agent: Its agent.
        odd: Values of the first and the last sample in place of the truth.
        conserved: Whether the ledger belongs to this node from the start.
    """
    for number in range(3):
        world.pass_time(1.0)
        reading = world.reading(wall=NOW + world.t, steady=world.t)
        if odd is not None and number != 1:
            reading = replace(reading, gpus=odd)
        agent.pipe.lines.append((0.0, wire.encode(reading)))
        agent.kubelet.ask(NOW + world.t)
        snapshot = agent.tick(NOW + world.t, world.t)
        save_now(agent.metering, NOW + world.t, world.t)
    check_page(snapshot, conserved=conserved)
    return snapshot


def check_page(snapshot: Snapshot, *, conserved: bool = True) -> None:
    """Check the page in both formats and as JSON: it is valid, series are unique, shares and totals are possible."""
    shown = families(snapshot, ExpositionOptions())
    for openmetrics in (False, True):
        try:
            parse(render(shown, openmetrics=openmetrics).decode("utf-8"))
        except ValueError as error:
            raise BrokenPromise(f"the page: {error}") from error
    held: dict[str, float] = {}
    for view in snapshot.devices:
        for pod in view.pods:
            held[view.gpu.uuid] = held.get(view.gpu.uuid, 0.0) + pod.holder.share_ratio
    require(all(0 < share <= 1 + _TOLERATED for share in held.values()), f"shares of {held}")
    if snapshot.metering.ledger is not None:
        ledger = snapshot.metering.ledger
        totals = ledger.accounts.values()
        seconds = sum(one.seconds.total for one in totals) + ledger.withheld_seconds
        require(all(one.seconds.total >= 0 for one in totals), "a negative total")
        apart = abs(seconds - ledger.capacity_seconds)
        require(
            not conserved or apart <= _TOLERATED * max(ledger.capacity_seconds, 1),
            f"{seconds} of {ledger.capacity_seconds} s",
        )
    require_json(node_api.device_document(snapshot).plain)
    require_json(node_api.ledger_document(snapshot).plain)
    node_page.document(snapshot).encode("utf-8", "replace")
