"""Checks of every page of an agent after any fault of its node: common to both chaos engines."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PAIR = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SERIES = re.compile(rf"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{{{_PAIR}(?:,{_PAIR})*\}})?")
_OF_A_POD = re.compile(r"gpu_pod_\w+_total\b")
_LEDGER = re.compile(r'\bledger="(\w+)"')
_PROMISED = ("gpu_ledger_", "gpu_exporter_ledger_capacity_")
"""Counters of an identity: an agent that shows the identity again never shows less."""
_KEPT = "gpu_pod_"
"""Prefix of counters that outlive an agent after a save."""
_HELD_BY = ("pod_uid", "container_name", "uuid")
NEAR_SECONDS, NEAR_RATIO = 1e-6, 1e-9
"""Tolerances between two sums of many floats."""


@lru_cache(maxsize=1 << 17)  # the same series are on every page
def _is_series(key: str) -> bool:
    return _SERIES.fullmatch(key) is not None


@lru_cache(maxsize=1 << 17)  # as above
def _labels(key: str) -> Mapping[str, str]:
    return dict(_LABEL.findall(key))


def near(one: float, other: float, absolute: float = NEAR_SECONDS) -> bool:
    """Return whether two sums of many floats are equal."""
    return abs(one - other) <= absolute + NEAR_RATIO * max(abs(one), abs(other))


@dataclass(slots=True)
class Page:
    """A page as served."""

    values: dict[str, float]
    """Values by name and labels, as on the page."""
    counters: frozenset[str]
    """Names of the counter families."""

    def rows(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield labels and value of every series of a name."""
        for key, value in self.values.items():
            if key.startswith(name) and key[len(name) : len(name) + 1] in ("{", ""):
                yield _labels(key), value

    def by_ledger(self, name: str) -> dict[str, float]:
        """Return the sums of a metric by the identity of the ledger."""
        sums: defaultdict[str, float] = defaultdict(float)
        for carried, value in self.rows(name):
            sums[carried["ledger"]] += value
        return sums

    def total(self, name: str) -> float:
        """Return the sum of a metric over its series."""
        return sum(value for _, value in self.rows(name))

    def one(self, name: str, **labels: str) -> float | None:
        """Return the value of the first series of a name that has the labels."""
        wanted = labels.items()
        return next((value for carried, value in self.rows(name) if wanted <= carried.items()), None)

    def living(self) -> int:
        """Return the number of series without the totals of owners and those of ended pods.

        Both stay on purpose, those of a pod for an hour.
        """
        here = {_held(key) for key in self.values if key.startswith("gpu_pod_info{")}
        ended = (key for key in self.values if _OF_A_POD.match(key) and _held(key) not in here)
        return len(self.values) - len({*ended, *(key for key in self.values if key.startswith("gpu_ledger_"))})


def _held(key: str) -> tuple[str, ...]:
    return tuple(_labels(key).get(one, "") for one in _HELD_BY)


def parse(text: str) -> Page:
    """Read a page.

    Raises:
        ValueError: The page is invalid: a duplicate series, a value that is no number, a broken line.
    """
    values: dict[str, float] = {}
    counters: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE ") and line.endswith(" counter"):
            counters.add(line.split(" ")[2])
        if not line or line.startswith("#"):
            continue
        key, _, number = line.rpartition(" ")
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"{number}: {key}")
        if key in values:
            raise ValueError(f"twice: {key}")
        if not _is_series(key):
            raise ValueError(f"no series: {key}")
        values[key] = value
    if not values:
        raise ValueError("an empty page")
    return Page(values, frozenset(counters))


class Violation(NamedTuple):
    """A check that failed."""

    at: float
    """Time of the world in seconds."""
    kind: str
    what: str


@dataclass(slots=True, kw_only=True)
class PageChecks:
    """Counts checks, keeps the failed ones, and compares each page with itself and with the pages before."""

    checks: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    counts: str = ""
    """Prefix of the counters that a fault of the node may not reset, in addition to those of ledgers."""
    shown: dict[str, float] = field(default_factory=dict)
    """The largest value of each counter."""
    ledgers: dict[str, float] = field(default_factory=dict)
    """Most seconds on a page under each identity."""

    def note(self, kind: str, t: float, what: str) -> None:
        """Note a violation that is not a check of a page."""
        self.violations.append(Violation(t, kind, what))

    def expect(self, kind: str, right: bool, t: float, message: str = "") -> None:  # noqa: FBT001 - the point of it
        """Count a check, and note a failure."""
        self.checks[kind] += 1
        if not right:
            self.note(kind, t, message)

    def agent_began(self, *, all_was_saved: bool) -> None:
        """Note another agent process: its own counters begin at 0; an identity continues or ends."""
        kept = (*_PROMISED, _KEPT) if all_was_saved else _PROMISED
        self.shown = {key: value for key, value in self.shown.items() if key.startswith(kept)}

    def read(self, text: str, t: float, most_seconds: float) -> Page | None:
        """Check one page; return ``None`` if it is invalid.

        Args:
            text: Text of the page.
            t: Time at which it was seen.
            most_seconds: Most seconds of all GPUs that agents can have metered.
        """
        try:
            page = parse(text)
        except ValueError as error:
            self.expect("page valid", False, t, str(error)[:300])  # noqa: FBT003 - as above
            return None
        self.checks["page valid"] += 1
        self._counters(page, t)
        self._ledgers(page, t, most_seconds)
        return page

    def _counters(self, page: Page, t: float) -> None:
        wrong = []
        here = page.by_ledger("gpu_exporter_ledger_capacity_seconds_total").keys()
        for key, before in self.shown.items():
            # Every series of an identity stays while the page shows the identity.
            found = _LEDGER.search(key) if key.startswith(_PROMISED) else None
            value = page.values.get(key, -1.0 if found and found[1] in here else math.inf)
            if value < before:
                wrong.append(f"{key} from {before!r} to {value!r}")
        for key, value in page.values.items():
            name = key.partition("{")[0]
            counts = name in page.counters or name.removesuffix("_total") in page.counters
            if counts and key.startswith((*_PROMISED, self.counts)):
                self.shown[key] = max(value, self.shown.get(key, -math.inf))
        self.expect("counters never go back", not wrong, t, f"{len(wrong)}: {wrong[:2]}")

    def _ledgers(self, page: Page, t: float, most_seconds: float) -> None:
        sums = page.by_ledger("gpu_ledger_seconds_total")
        capacity = page.by_ledger("gpu_exporter_ledger_capacity_seconds_total")
        created = page.by_ledger("gpu_ledger_created_timestamp_seconds").keys()
        writes = page.one("gpu_exporter_ledger_writer") != 0
        self.expect("only the writer shows the ledger", writes or not (sums or created), t)
        self.expect("every ledger has a beginning", sums.keys() <= created, t, f"{sorted(sums.keys() - created)}")
        self.expect("every ledger has a capacity", sums.keys() <= capacity.keys(), t, f"{sums}, {capacity}")
        for identity, whole in capacity.items():
            allocated = sums.get(identity, 0.0)
            self.expect("owners sum to capacity", near(allocated, whole), t, f"{allocated!r} of {whole!r} s")
        error = page.one("gpu_exporter_conservation_error_seconds") or 0.0
        self.expect(
            "conservation error", near(error, 0.0, NEAR_SECONDS + NEAR_RATIO * sum(capacity.values())), t, f"{error}"
        )
        for identity, seconds in sums.items():
            self.ledgers[identity] = max(seconds, self.ledgers.get(identity, 0.0))
        total = sum(self.ledgers.values()) + (page.one("gpu_exporter_ledger_withheld_seconds") or 0.0)
        self.expect("no second is in two ledgers", total <= most_seconds, t, f"{total:.3f} s of {most_seconds:.3f}")


def tables(faults: Counter[str], checks: Counter[str], violations: Iterable[Violation]) -> str:
    """Return the tables of injections and checks."""
    broken = Counter(one.kind for one in violations)
    rows = [*faults.most_common(), ("**all**", faults.total())]
    lines = ["", "| fault | injected |", "|---|---:|", *(f"| {kind} | {count} |" for kind, count in rows)]
    lines += ["", "| invariant | checked | violated |", "|---|---:|---:|"]
    lines += [f"| {kind} | {checks[kind]} | {broken[kind]} |" for kind in sorted({*checks, *broken})]
    return "\n".join([*lines, f"| **all** | {checks.total()} | {broken.total()} |", ""])
