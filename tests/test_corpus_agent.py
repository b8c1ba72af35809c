"""What the corpus says that an agent shows, against the agent's own meter and ledger, second by second."""

from collections.abc import Iterator

import pytest
from corpus_engine import agent_page
from corpus_series import LINGER_SECONDS, Series
from corpus_support import Shape, shape_of
from metering_support import holder, namespace_pays, use, whole

from exporter.accounting.ledger import Ledger
from exporter.accounting.usage import Meter
from exporter.model import DeviceView, ShareMode, Totals

STEP_SECONDS = 30
PARTS = ("allocated", "active", "idle", "unknown")

PHASES = {
    "name": "phases",
    "why": "One pod with GPUs of its own.",
    "lasts": "40m",
    "metadata": False,
    "workloads": [
        {
            "name": "p",
            "pods": [
                {
                    "name": "p",
                    "from": "1m",
                    "to": "30m",
                    "each": [["0.9 5m", "? 4m", "0"], [{"repeat": ["1 7s", "0 31s"]}]],
                }
            ],
        }
    ],
}
SHARERS = {
    "name": "sharers",
    "why": "Two pods that share a GPU, the one busier than its share.",
    "lasts": "20m",
    "metadata": False,
    "workloads": [
        {"name": "a", "pods": [{"name": "a", "gpu": "g", "share": 0.25, "activity": ["0.6 6m", "0.1"]}]},
        {"name": "b", "pods": [{"name": "b", "gpu": "g", "share": 0.25, "from": "2m", "to": "12m", "activity": 0}]},
    ],
}


def views(shape: Shape, t: float) -> Iterator[DeviceView]:
    """The node of a shape at ``t``, as the agent's tick would see it."""
    for board in shape.boards:
        pods = [
            use(
                holder(
                    pod.name,
                    f"GPU-{board.index}",
                    share=held.share,
                    mode=ShareMode.SHARED if held.mode == "shared" else ShareMode.EXCLUSIVE,
                    namespace=pod.namespace,
                ),
                held.part.at(t),
            )
            for workload in shape.workloads
            for pod in workload.pods
            for held in pod.uses
            if held.board == board and pod.start <= t < pod.end
        ]
        yield whole(*pods, index=board.index)


def metered(shape: Shape) -> dict[tuple[str, str, str], list[float | None]]:
    """(level, pod and GPU or namespace, part) to what the agent shows every 30 s."""
    meter, ledger = Meter(1.0, namespace_pays), Ledger(linger_seconds=LINGER_SECONDS, birth_seconds=75.0)
    count = int(shape.lasts // STEP_SECONDS)
    shown: dict[tuple[str, str, str], list[float | None]] = {}
    for t in range(-1, count * STEP_SECONDS):
        ledger.charge(meter.add(list(views(shape, t)), float(t)), {}, float(t))
        if t < 0 or t % STEP_SECONDS:
            continue
        view = ledger.view(float(t))
        rows: list[tuple[str, str, Totals]] = [
            *(("gpu_pod", f"{pod.pod}@{pod.gpu_index}", totals) for pod, totals in view.pods.items()),
            *(
                ("gpu_ledger", account.owner.namespace, totals)
                for account, totals in view.accounts.items()
                if account.owner.namespace
            ),
        ]
        for level, whose, totals in rows:
            for part in PARTS:
                row = shown.setdefault((level, whose, part), [None] * count)
                row[t // STEP_SECONDS] = getattr(totals, f"{part}_seconds")
    return shown


@pytest.mark.parametrize("raw", [PHASES, SHARERS], ids=lambda raw: raw["name"])
def test_the_corpus_shows_the_seconds_that_meter_and_ledger_show(raw: dict[str, object]) -> None:
    shape = shape_of(raw)
    series = Series([float(STEP_SECONDS * number) for number in range(int(shape.lasts // STEP_SECONDS))])
    agent_page(shape, series)
    seen = 0
    for (level, whose, part), real in metered(shape).items():
        for (name, labels), mine in series.rows.items():
            label = dict(labels)
            called = (
                f"{label.get('pod_name')}@{label.get('gpu')}" if level == "gpu_pod" else label.get("workload_namespace")
            )
            if name == f"{level}_{part}_seconds_total" and called == whose:
                seen += 1
                for t, one, other in zip(series.times, real, mine, strict=True):
                    # Births and ends are found by the second, and a sample tells of the second before it.
                    if isinstance(one, float) and isinstance(other, float) and one and other:
                        assert one == pytest.approx(other, abs=2.5), (name, whose, t)
                there = [sum(isinstance(value, float) for value in row) for row in (real, mine)]
                assert there[0] == pytest.approx(there[1], abs=2), (name, whose)
    assert seen == len(metered(shape))
