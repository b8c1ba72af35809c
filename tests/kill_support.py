"""A metering process that is killed repeatedly: meters virtual time fast, saves and shows as the agent does.

As a program, it forks one metering child per round, kills it with SIGKILL at a random moment, and checks the state.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metering_support import holder, namespace_pays, use, whole

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.prices import Match, NodePrices, PriceBook, PriceRow
from exporter.accounting.state_file import UNSYNCED, StateFile
from exporter.agent.metering import Metering, Save
from exporter.errors import StateError
from exporter.model.attribution import ShareMode
from exporter.model.ledger import LedgerView, Price, Totals
from exporter.model.snapshot import DeviceView

SPEED = 200.0
"""Virtual seconds per second: a sample every 5 ms, a save every 25 ms."""
GPUS = 4
FAILS_SECONDS = 12.0
"""Seconds of each 20 in which the disk fails, in some rounds."""
LIFE_SECONDS = 37.0
"""Lifetime of a pod; another one follows."""
LONGEST_ROUND_SECONDS = 0.15


def views_at(steady: float) -> list[DeviceView]:
    """Return three whole GPUs with pods that come and go, and one with four replicas, one of them free."""
    generation = int(steady // LIFE_SECONDS)
    busy = (steady % 10.0) / 10.0
    wholes = [
        whole(use(holder(f"job-{index}-{generation}", f"GPU-{index}", namespace=f"team-{index}"), busy), index=index)
        for index in range(GPUS - 1)
    ]
    shared = [
        use(holder(f"s-{n}-{generation}", f"GPU-{GPUS - 1}", share=0.25, mode=ShareMode.SHARED), busy / 4)
        for n in range(3)
    ]
    return [*wholes, whole(*shared, busy=busy, index=GPUS - 1)]


@dataclass(slots=True)
class FaultyFile(StateFile):
    """A state file with write errors: not written, or written and reported as lost."""

    trouble: Callable[[], str] = str

    def save(self, state: Mapping[str, Any]) -> None:
        """Save, or raise the current fault."""
        trouble = self.trouble()
        if trouble != "state_full":
            StateFile.save(self, state)
        if trouble:
            raise StateError(trouble, f"state: {trouble}")


def trouble_at(number: int, steady: float) -> str:
    """Return the fault of the disk in a round, at a virtual time; empty without one."""
    kind = ("", "state_full", "", UNSYNCED)[number % 4]
    return kind if steady % 20.0 < FAILS_SECONDS else ""


def metering_of(file: StateFile, steady: float) -> Metering:
    """Return the metering of a starting agent."""
    row = PriceRow(
        number=1,
        match=Match(),
        price=Price(per_hour=3.6, currency="USD", source="test:1", as_of="2026-01-01"),
        source="test",
    )
    made = Metering(
        meter=Meter(1.0, namespace_pays),
        ledgers=Ledgers(saves=True),
        prices=NodePrices(book=PriceBook(name="test", currency="USD", rows=(row,))),
        file=file,
        boot_id="boot",
    )
    made.restore(steady)
    return made


def gpus_and_capacity(directory: Path) -> tuple[int, float, float]:
    """Return GPUs, GPU-seconds and the instant up to which they were metered, from the state."""
    state = StateFile(directory).load()
    assert state is not None
    totals = [account["totals"] for account in state["ledger"]["accounts"]]
    metered = sum(sum(entry["seconds"].values()) for entry in totals)
    gpus = len({slot["gpu_uuid"] for slot in state["slots"]})
    return gpus, metered, state["metered_steady"]


def flat(view: LedgerView) -> dict[str, float]:
    """Return every counter of a view by a unique name."""
    lines: list[tuple[str, object, Totals]] = [
        (f"ledger {ledger.identity}", account, totals)
        for ledger in view.ledgers
        for account, totals in ledger.accounts.items()
    ]
    counters = {f"ledger {ledger.identity} capacity": ledger.capacity_seconds for ledger in view.ledgers}
    for kind, key, totals in [*lines, *(("pod", pod, totals) for pod, totals in view.pods.items())]:
        for unit, figures in (("seconds", totals.seconds), *totals.money.items()):
            counters |= {f"{kind} {key} {state} {unit}": figure for state, figure in figures}
    return counters


def meter(directory: Path, log: Path, zero: float, number: int) -> None:
    """Meter until killed.

    Args:
        directory: Directory of the state.
        log: File for shown values.
        zero: Start of virtual time.
        number: Number of the round.
    """
    clock = partial(lambda: (time.monotonic() - zero) * SPEED)
    metering = metering_of(FaultyFile(directory, trouble=lambda: trouble_at(number, clock())), clock())
    assert not metering.problem, metering.problem
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pool = ThreadPoolExecutor(1)
    save: Save | None = None
    written: Future[Any] = Future()
    while True:
        steady = clock()
        entry: dict[str, Any] = {"sample": steady}
        os.write(descriptor, json.dumps(entry).encode() + b"\n")
        metering.observe(views_at(steady), sampled_steady=steady, now=steady, steady=steady)
        if save and written.done():
            metering.end_save(save, written.result())
            save = None
        if not save and (save := metering.begin_save(steady, steady)):
            written = pool.submit(save.write)
        view = metering.ledger_view(steady)
        if view:
            entry = {"shown": flat(view), "saved": view.saved_at_seconds is not None}
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
        time.sleep(max(0.0, 1 / SPEED - (clock() - steady) / SPEED))


class Judge:
    """Compares every round with the rounds before."""

    def __init__(self) -> None:
        self.shown: dict[str, float] = {}
        self.began: float | None = None
        self.until = 0.0
        self.unknown_expected = self.unknown = self.capacity = 0.0
        self.saved: dict[str, tuple[float, float]] = {}
        """Seconds, and unknown seconds, of every ledger that was ever on disk."""
        self.ledgers: set[str] = set()
        self.rounds_that_saved = 0
        self.visible = 0

    def look(self, directory: Path, log: Path) -> None:
        """Check the values that a killed process showed, and its state."""
        entries = [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]] if log.exists() else []
        self._shown(entries)
        state = StateFile(directory).load()
        if state is None:
            return
        for ledger in (state["ledger"], *state["former_ledgers"]):
            accounts = [account["totals"] for account in ledger["accounts"]]
            total = sum(sum(account["seconds"].values()) for account in accounts)
            assert abs(total - ledger["capacity_seconds"]) <= 1e-6
            # An ended ledger keeps its values, even after it leaves the file.
            self.saved[ledger["id"]] = (total, sum(account["seconds"]["unknown"] for account in accounts))
        self.capacity = capacity = sum(total for total, _ in self.saved.values())
        steady = state["metered_steady"]
        began = steady - capacity / GPUS
        if self.began is None:
            self.began, self.until = began, began
        assert abs(began - self.began) <= 1e-9 * steady + 1e-6, "seconds were lost or counted twice"
        if steady > self.until:
            self.rounds_that_saved += 1
            for sample in (entry["sample"] for entry in entries if "sample" in entry):
                if self.until < sample <= steady:
                    interval = sample - self.until
                    self.unknown_expected += GPUS * interval if interval > 3.0 else 0.0
                    self.until = sample
            assert self.until == steady, "a saved sample was never taken"
        self.unknown = sum(unknown for _, unknown in self.saved.values())
        assert abs(self.unknown - self.unknown_expected) <= 1e-6, "unknown seconds differ from those without samples"

    def _shown(self, entries: list[dict[str, Any]]) -> None:
        """Compare the values that a process has shown with all values shown before."""
        seen = dict(self.shown)
        for entry in entries:
            for name, value in entry.get("shown", {}).items():
                assert value >= seen.get(name, 0.0), f"decreased from {seen[name]}: {name} {value}"
                seen[name] = value
                is_ledger = name.startswith("ledger")
                if is_ledger or entry["saved"]:  # pods have no identity
                    self.shown[name] = value
                if is_ledger and value > 0:
                    self.visible += 1
                    self.ledgers.add(name.split()[1])


def main(directory: Path, rounds: int, seed: int) -> None:
    """Kill ``rounds`` metering processes and print the results as JSON."""
    chance = random.Random(seed)  # noqa: S311 - moments to kill, not secrets
    zero = time.monotonic() - 1.0
    judge = Judge()
    logs = directory / "logs"
    logs.mkdir()
    (directory / "state").mkdir()
    for number in range(rounds):
        log = logs / str(number)
        child = os.fork()
        if child == 0:
            try:
                meter(directory / "state", log, zero, number)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.0, LONGEST_ROUND_SECONDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"round {number} ended by itself"
        judge.look(directory / "state", log)
    left = sorted(path.name for path in (directory / "state").iterdir())
    print(  # noqa: T201 - the test reads it
        json.dumps(
            {
                "rounds": rounds,
                "saved": judge.rounds_that_saved,
                "gpu_seconds": judge.capacity,
                "unknown": judge.unknown,
                "visible": judge.visible,
                "ledgers": len(judge.ledgers),
                "left": left,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
