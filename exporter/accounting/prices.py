"""Prices the use of GPUs: rows of price books, selection of a row, and the cost of seconds and joules."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState, Portion, Price
from exporter.model.snapshot import DeviceView

HOURS_PER_YEAR = 8760
SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
_PATTERN, _EXACT = 1, 2


class PricedGpu(NamedTuple):
    """A physical GPU, and the facts that select its price."""

    model: str
    """Name of the GPU in NVML."""
    node: str = ""
    facts: NodeFacts = NodeFacts()
    """Other known facts of the node."""
    facts_complete: bool = True
    """Whether an empty fact is absent on the node. If false, it is not known yet and can have any value."""


class Match(NamedTuple):
    """Conditions of a row; an empty one matches everything.

    Patterns contain ``*`` (any text) and ``?`` (one character), and ignore case.
    """

    node: str = ""
    instance_type: str = ""
    capacity_type: str = ""
    region: str = ""
    model: str = ""
    """Condition on NVML's name of the GPU: ``NVIDIA H100 80GB HBM3``."""

    @property
    def specificity(self) -> tuple[int, int, int, int]:
        """Precedence of the row; the row with the larger value applies.

        Order: node, instance type, capacity type and region, model; a name has precedence over a pattern.
        """
        where = _weight(self.capacity_type) + _weight(self.region)
        return (_weight(self.node), _weight(self.instance_type), where, _weight(self.model))

    @property
    def description(self) -> str:
        """Conditions as text: ``instance_type p5.*, region us-east-1``; ``every GPU`` without a condition."""
        return ", ".join(f"{name} {asked}" for name, asked in self._asdict().items() if asked) or "every GPU"

    def matches(self, gpu: PricedGpu) -> bool:
        """Return whether the row matches a GPU; every pattern can match a fact that is not known yet."""
        found = (gpu.node, gpu.facts.instance_type, gpu.facts.capacity_type, gpu.facts.region, gpu.model)
        return all(
            not asked or (_compiled(asked).fullmatch(text) if text else not gpu.facts_complete)
            for asked, text in zip(self, found, strict=True)
        )

    def meets(self, other: "Match", known_models: Collection[str] = ()) -> bool:
        """Return whether one GPU on one node can match both rows.

        Model patterns that match different known models do not conflict: ``*H100*`` and ``*A100*`` do not, although a
        name could contain both.
        """
        both = [(mine.casefold(), theirs.casefold()) for mine, theirs in zip(self, other, strict=True)]
        if not all(patterns_meet(mine, theirs) for mine, theirs in both if mine and theirs):
            return False
        mine, theirs = (
            {model for model in known_models if _compiled(match.model).fullmatch(model)} for match in (self, other)
        )
        return not mine or not theirs or bool(mine & theirs)


def _weight(pattern: str) -> int:
    if not pattern:
        return 0
    return _PATTERN if set(pattern) & set("*?") else _EXACT


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")), re.IGNORECASE)


@lru_cache(maxsize=65_536)
def _beginning(pattern: str) -> str:
    """Return the text before the first ``*`` or ``?``."""
    return pattern.partition("*")[0].partition("?")[0]


def patterns_meet(one: str, other: str) -> bool:
    """Return whether two patterns with ``*`` and ``?`` can match the same text."""
    mine_begins, theirs_begins = _beginning(one), _beginning(other)
    common = min(len(mine_begins), len(theirs_begins))
    if mine_begins[:common] != theirs_begins[:common]:
        return False  # fast path: most pairs of thousands of rows differ here
    # met[j]: the prefix of `one` read so far and the first j characters of `other` can match the same text.
    met = [True]
    for theirs in other:
        met.append(met[-1] and theirs == "*")
    for mine in one:
        row = [met[0] and mine == "*"]
        for j, theirs in enumerate(other):
            if "*" in (mine, theirs):
                row.append(met[j + 1] or row[j])
            else:
                row.append(met[j] and (mine == theirs or "?" in (mine, theirs)))
        met = row
    return met[-1]


def settled_facts(given: NodeFacts, labelled: NodeFacts) -> NodeFacts:
    """Return the facts that select a node's prices: the given facts, completed with those of its labels."""
    return NodeFacts(**{name: getattr(given, name) or getattr(labelled, name) for name in NodeFacts.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPrem:
    """Costs of an on-premises server; money in the book's currency."""

    capex: float
    """Cost of the server, including its part of network and storage."""
    years: float
    """Period of depreciation in years."""
    gpus: int
    """Number of physical GPUs in the server."""
    kw_per_gpu: float | None = None
    """Mean power per GPU at the server's plug; ``None`` if the GPU's measured energy is charged instead."""
    pue: float = 1.0
    """Power of the whole site divided by the power of its servers, at least 1."""
    per_kwh: float = 0.0
    opex_per_year: float = 0.0
    """Yearly operating cost of the server: staff, space, maintenance."""
    target_availability: float = 1.0
    """Part of the hours that is planned to be sold; their price includes the cost of the other hours."""

    def per_gpu_hour(self, gpu_part: float = 1.0) -> float:
        """Return the price of an hour of one GPU; ``gpu_part`` is the part of the server's cost without energy."""
        fixed = (self.capex / self.years + self.opex_per_year) * gpu_part / (HOURS_PER_YEAR * self.gpus)
        energy = (self.kw_per_gpu or 0.0) * self.pue * self.per_kwh
        return (fixed + energy) / self.target_availability

    @property
    def per_measured_kwh(self) -> float:
        """Return the price of a kilowatt-hour of measured energy; 0 if ``kw_per_gpu`` covers it.

        It is not divided by ``target_availability``: energy in unsold hours is measured and charged to Unallocated.
        """
        return 0.0 if self.kw_per_gpu is not None else self.pue * self.per_kwh


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """A row of a price book, with its computed price."""

    number: int
    """Number of the row in the file, from 1."""
    match: Match
    price: Price
    from_seconds: float = -inf
    """Unix time from which the row applies."""
    to_seconds: float = inf
    """Unix time from which the row no longer applies."""
    source: str
    """Origin of the price, as text for users."""

    def holds_at(self, at_seconds: float) -> bool:
        """Return whether the row applies at a time."""
        return self.from_seconds <= at_seconds < self.to_seconds

    def common_time(self, other: "PriceRow") -> tuple[float, float] | None:
        """Return the start and end of the time in which both rows apply; ``None`` without such a time."""
        start, end = max(self.from_seconds, other.from_seconds), min(self.to_seconds, other.to_seconds)
        return (start, end) if start < end else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBook:
    """Prices in one currency, and another book for GPUs that match no row."""

    name: str = ""
    currency: str = ""
    gpu_part: float = 1.0
    """Part of a node's price that is for its GPUs; the rest is for other parts of the node."""
    rows: tuple[PriceRow, ...] = ()
    fallback: "PriceBook | None" = None
    warnings: tuple[str, ...] = ()
    """Likely mistakes that are not errors, one line each."""
    _candidates: dict[PricedGpu, list[PriceRow]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def price(self, gpu: PricedGpu, at_seconds: float) -> Price | None:
        """Return the price of a GPU at a Unix time; ``None`` (unknown, not 0) if no row matches.

        It is also unknown while a fact that is not known yet could select another row.
        """
        for row in self._matching(gpu):
            if row.holds_at(at_seconds):
                certain = gpu.facts_complete or row.match.matches(gpu._replace(facts_complete=True))
                return row.price if certain else None
        price = self.fallback.price(gpu, at_seconds) if self.fallback else None
        return price and replace(price, fallback=True)

    def changes(self, gpu: PricedGpu, *, after: float, until: float) -> set[float]:
        """Return the Unix times after ``after``, up to ``until``, at which the price of a GPU may change."""
        rows = self._matching(gpu._replace(facts_complete=False))
        found = {edge for row in rows for edge in (row.from_seconds, row.to_seconds) if after < edge <= until}
        return found | (self.fallback.changes(gpu, after=after, until=until) if self.fallback else set())

    def _matching(self, gpu: PricedGpu) -> list[PriceRow]:
        candidates = self._candidates.get(gpu)
        if candidates is None:
            found = (row for row in self.rows if row.match.matches(gpu))
            # The sort is stable: in a tie, which only an unknown model can cause, the first row applies.
            candidates = sorted(found, key=lambda row: row.match.specificity, reverse=True)
            self._candidates[gpu] = candidates
        return candidates

    @property
    def description(self) -> str:
        """Name of the book and the part of a node that it covers, as text; empty without prices."""
        books = [book for book in (self, self.fallback) if book is not None and book.rows]
        return "; else ".join(f"{book.name} (GPUs are {book.gpu_part:.0%} of a node's price)" for book in books)


def money(by_state: ByState, energy_joules: float | None, price: Price) -> ByState:
    """Return the cost of seconds and joules, in the price's currency.

    Args:
        by_state: Share-weighted seconds.
        energy_joules: Energy; ``None`` if it was not measured.
        price: Price of a whole physical GPU at that time.

    Returns:
        Cost of the hours at the hourly price, and of measured energy if it has a price. The cost of energy is divided
        among the states like the seconds; without seconds, it is active and unprofiled.
    """
    per_second = price.per_hour / SECONDS_PER_HOUR
    seconds = by_state.total
    energy = (energy_joules or 0.0) / JOULES_PER_KWH * price.per_kwh
    if energy and not seconds:
        return ByState(unprofiled=energy)
    if energy:
        per_second += energy / seconds
    return by_state.scaled(per_second)


@dataclass(slots=True, kw_only=True)
class NodePrices:
    """Prices of one node's GPUs: a book, and the known facts of the node."""

    node: str = ""
    book: PriceBook = field(default_factory=PriceBook)
    facts: NodeFacts = field(default_factory=NodeFacts)
    """Facts of the node from the flags."""
    labelled: NodeFacts | None = None
    """Facts from the node's labels, as last read by this or the previous process; ``None`` until read. Flags have
    precedence."""
    awaits_labels: bool = False
    """Whether the labels of the node are not read yet, so that prices that may depend on them are unknown."""
    current: dict[str, Price] = field(default_factory=dict)
    """Prices at the last look-up by UUID of the physical GPU; a GPU without a price is absent."""
    _models: Mapping[str, str] = field(default_factory=dict)
    """Models at that time by UUID."""

    def learn(self, found: NodeFacts | None) -> None:
        """Store the facts of the node's labels, for facts without a flag; ``None`` while they cannot be read."""
        self.labelled = found or self.labelled
        self.awaits_labels = self.labelled is None

    @property
    def node_facts(self) -> NodeFacts:
        """Return all known facts of the node."""
        return settled_facts(self.facts, self.labelled or NodeFacts())

    @property
    def unpriced_gpus(self) -> int:
        """Number of GPUs without a price."""
        return len(self._models) - len(self.current)

    def look_up(self, views: Iterable[DeviceView], now: float) -> None:
        """Store the price of every GPU at a time."""
        self._models = {view.gpu.uuid: view.gpu.model for view in views}
        self.current = self._at(now)

    @property
    def _gpus(self) -> list[PricedGpu]:
        """One GPU of each model."""
        facts, complete = self.node_facts, not self.awaits_labels
        return [PricedGpu(model, self.node, facts, complete) for model in set(self._models.values())]

    def _at(self, now: float) -> dict[str, Price]:
        found = {gpu.model: self.book.price(gpu, now) for gpu in self._gpus}
        return {uuid: price for uuid, model in self._models.items() if (price := found[model])}

    def split(self, portions: Sequence[Portion], now: float) -> Iterator[tuple[Sequence[Portion], Mapping[str, Price]]]:
        """Yield the portions of a sample with their prices, split at each change of a price."""
        longest = max((portion.interval_seconds or 0.0 for portion in portions), default=0.0)
        after = now - longest
        changes = {at for gpu in self._gpus for at in self.book.changes(gpu, after=after, until=now)}
        if not changes:
            yield portions, self.current
            return
        ages = {longest: after, **{now - at: at for at in changes}, 0.0: now}
        for older, newer in pairwise(sorted(ages, reverse=True)):
            parts = [part for portion in portions if (part := _part_of(portion, older, newer))]
            yield parts, self._at(ages[older])


def _part_of(portion: Portion, older: float, newer: float) -> Portion | None:
    """Return the part of a portion between two ages of its interval in seconds; ``None`` without such a part.

    A portion without an interval has age 0. Ages are used because differences of Unix times lose microseconds.
    """
    interval = portion.interval_seconds
    if not interval:
        return None if newer else portion
    seconds = min(interval, older) - newer
    return portion.part(seconds / interval) if seconds > 0 else None


def overlaps(
    rows: tuple[PriceRow, ...], known_models: Collection[str] = ()
) -> Iterator[tuple[PriceRow, PriceRow, float, float]]:
    """Yield pairs of conflicting rows without a precedence, and start and end of the conflict as Unix times.

    See ``Match.meets``.
    """
    groups: dict[tuple[object, ...], list[PriceRow]] = {}
    for row in rows:
        groups.setdefault(_kin(row.match), []).append(row)
    for group in groups.values():
        for index, earlier in enumerate(group):
            for later in group[index + 1 :]:
                common = earlier.common_time(later)
                if common and earlier.match.meets(later.match, known_models):
                    yield earlier, later, *common


def _kin(match: Match) -> tuple[object, ...]:
    """Return a key that competing rows share: specificity and exact names."""
    node, instance_type, where, model = weights = match.specificity
    exact = (
        match.node if node == _EXACT else "",
        match.instance_type if instance_type == _EXACT else "",
        (match.capacity_type + "/" + match.region) if where == 2 * _EXACT else "",
        match.model if model == _EXACT else "",
    )
    return (weights, *(text.casefold() for text in exact))
