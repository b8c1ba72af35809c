"""A metering process that is killed again and again: meters virtual time fast, saves and shows as the agent does.

Run as a program: forks one metering child per round, kills it with SIGKILL at a random moment, looks at what is left.
"""

import json
import os
import random
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from metering_support import holder, namespace_pays, use, whole

from exporter.accounting.ledger import Ledger
from exporter.accounting.pricing import Match, PriceBook, PriceRow
from exporter.accounting.state_file import StateFile
from exporter.accounting.usage import Meter
from exporter.agent.metering import Metering, Save
from exporter.model import DeviceView, LedgerView, NodeFacts, Price, ShareMode

SPEED = 200.0
"""Virtual seconds per second: a sample every 5 ms, a save every 25 ms."""
GPUS = 4
LIFE_SECONDS = 37.0
"""Of a pod: another one after it."""
LONGEST_ROUND_SECONDS = 0.15
BIRTH_SECONDS = 4.0
"""Shorter than most lives, or nothing but zeros would be seen."""


def views_at(steady: float) -> list[DeviceView]:
    """Three whole GPUs with pods that come and go, one that four replicas share, of which one is free."""
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


def metering_of(directory: Path, steady: float) -> Metering:
    """What the agent makes at its start."""
    row = PriceRow(
        number=1,
        match=Match(),
        price=Price(per_hour=3.6, currency="USD", source="test:1", as_of="2026-01-01"),
        source="test",
    )
    made = Metering(
        node="n",
        meter=Meter(1.0, namespace_pays),
        ledger=Ledger(birth_seconds=BIRTH_SECONDS),
        book=PriceBook(name="test", currency="USD", rows=(row,)),
        facts=NodeFacts(),
        file=StateFile(directory),
        boot_id="boot",
    )
    made.restore(partial(Ledger.load, birth_seconds=BIRTH_SECONDS), steady)
    return made


def flat(view: LedgerView) -> dict[str, float]:
    """Every counter of a view under a name of its own."""
    lines = [("account", account, totals) for account, totals in view.accounts.items()]
    pods = [("pod", pod, totals) for pod, totals in view.pods.items()]
    counters = {"capacity": view.capacity_seconds}
    for kind, key, totals in [*lines, *pods]:
        for name in ("active_seconds", "idle_seconds", "unknown_seconds"):
            counters[f"{kind} {key} {name}"] = getattr(totals, name)
        for currency, money in totals.money.items():
            counters[f"{kind} {key} {currency}"] = money.total
            counters[f"{kind} {key} idle {currency}"] = money.idle
    return counters


def meter(directory: Path, log: Path, zero: float) -> None:
    """Meter until killed; ``zero`` is where virtual time began."""
    clock = partial(lambda: (time.monotonic() - zero) * SPEED)
    metering = metering_of(directory, clock())
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
        view = metering.view(steady)
        if view:
            os.write(descriptor, json.dumps({"shown": flat(view)}).encode() + b"\n")
        time.sleep(max(0.0, 1 / SPEED - (clock() - steady) / SPEED))


class Judge:
    """Holds every round against the ones before."""

    def __init__(self) -> None:
        self.shown: dict[str, float] = {}
        self.began: float | None = None
        self.until = 0.0
        self.unknown_expected = self.unknown = self.capacity = 0.0
        self.rounds_that_saved = 0
        self.visible = 0

    def look(self, directory: Path, log: Path) -> None:
        """Judge what one killed process showed and left."""
        entries = [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]] if log.exists() else []
        for entry in entries:
            for name, value in entry.get("shown", {}).items():
                assert value >= self.shown.get(name, 0.0), f"went back from {self.shown[name]}: {name} {value}"
                self.shown[name] = value
                self.visible += name.startswith("account") and value > 0
        state = StateFile(directory).load()
        if state is None:
            return
        accounts = [account["totals"] for account in state["ledger"]["accounts"]]
        total = sum(a["active_seconds"] + a["idle_seconds"] + a["unknown_seconds"] for a in accounts)
        self.capacity = capacity = state["ledger"]["capacity_seconds"]
        assert abs(total - capacity) <= 1e-9 * capacity
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
        self.unknown = sum(a["unknown_seconds"] for a in accounts)
        assert abs(self.unknown - self.unknown_expected) <= 1e-6, "other seconds are unknown than those not seen"


def main(directory: Path, rounds: int, seed: int) -> None:
    """Kill ``rounds`` metering processes and print what was seen as JSON."""
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
                meter(directory / "state", log, zero)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.0, LONGEST_ROUND_SECONDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"round {number} ended by itself"
        judge.look(directory / "state", log)
    left = sorted(path.name for path in (directory / "state").iterdir())
    print(  # noqa: T201 - what the test reads
        json.dumps(
            {
                "rounds": rounds,
                "saved": judge.rounds_that_saved,
                "gpu_seconds": judge.capacity,
                "unknown": judge.unknown,
                "visible": judge.visible,
                "left": left,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
