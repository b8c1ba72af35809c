"""Recommendations and budgets as pages show them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.report.budget.values import BudgetState
from exporter.report.fleet.report import FleetReport
from exporter.report.recommend.values import Advice, Recommendation
from exporter.report.render.rows import noun
from exporter.report.service.book import Book
from exporter.report.service.view_query import View

ADVICE_WORDS: Mapping[Advice, str] = {
    "give-back": "Give back",
    "fewer-gpus": "Fewer GPUs",
    "share": "Share",
    "smaller-mig": "Smaller MIG profile",
    "smaller-model": "Smaller model",
}
_LONGEST_BAR_RATIO = 1.5
_RISK_LOOKS = {"low": "ok", "medium": "idle", "high": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """A recommendation, and the page of whom it is for."""

    of: Recommendation
    sort: str
    look: str
    """Of its risk."""
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a budget stands, in words and as parts of its amount."""

    state: BudgetState
    words: str
    look: str
    """``ok``, ``warn``, ``bad``: the words say the same."""
    spent_ratio: float | None
    """``None`` where what was spent is not known."""
    projected_ratio: float | None
    scale_ratio: float
    """Where its bar ends: at the amount, or beyond it."""
    owner: str
    href: str


def advised(recommendations: Sequence[Recommendation], view: View) -> list[Advised]:
    """Those within the filters, in the order given."""
    return [
        Advised(
            of=one,
            sort=ADVICE_WORDS[one.advice],
            look=_RISK_LOOKS[one.risk_level],
            href=view.owner(
                **({"cluster": one.cluster} if one.cluster else {}),
                namespace=one.namespace,
                kind=one.kind,
                workload=one.workload,
            ),
        )
        for one in recommendations
        if _is_wanted(one, view)
    ]


def _is_wanted(one: Recommendation, view: View) -> bool:
    """What a recommendation does not know, as the pool, it is not said to have."""
    known: dict[str, Sequence[str]] = {
        "cluster": (one.cluster,),
        "node": one.nodes,
        "namespace": (one.namespace,),
        "kind": (one.kind,),
        "workload": (one.workload,),
        "team": (one.team,),
        "model": (one.model,),
    }
    return all(not values.isdisjoint(known.get(name, ())) for name, values in view.filters.wanted.items())


def savings(advice: Sequence[Advised]) -> dict[str, float]:
    """What all of them would save per month, by currency."""
    sums: dict[str, float] = {}
    for one in advice:
        if one.of.per_month is not None:
            sums[one.of.currency] = sums.get(one.of.currency, 0.0) + one.of.per_month
    return sums


def standing(state: BudgetState, view: View) -> Standing:
    """Words for a budget."""
    amount = state.budget.amount
    spent = state.spent / amount if amount > 0 and state.known else None
    projected = state.projected / amount if state.projected is not None and amount > 0 else None
    if spent is None:
        words, look = "not known", "unknown"
    elif spent >= 1:
        words, look = "spent", "bad"
    elif projected is not None and projected > 1:
        words, look = "will be overspent", "warn"
    elif projected is None:
        words, look = "too early to tell", "unknown"
    else:
        words, look = "on course", "ok"
    owner = ", ".join(f"{noun(name)} {value}" for name, value in state.budget.owner.items())
    return Standing(
        state=state,
        words=words,
        look=look,
        spent_ratio=spent,
        projected_ratio=projected,
        scale_ratio=min(_LONGEST_BAR_RATIO, max(1.0, spent or 0.0, projected or 0.0)),
        owner=owner or ("all GPUs, held or not" if state.budget.include_unallocated else "all that is held"),
        href=view.owner(**{str(name): value for name, value in state.budget.owner.items()})
        if state.budget.owner
        else view.link("/"),
    )


async def recommendations(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of recommendations."""
    report = await book.report(view.window, (), view.filters)
    advice = advised(book.recommendations(), view)
    return report, {"advice": advice, "savings": sorted(savings(advice).items())}


async def budgets(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of budgets."""
    report = await book.report(view.window, ())
    return report, {"budgets": [standing(state, view) for state in book.budgets()]}


async def about(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page that says how the others come about."""
    return await book.report(view.window, ()), {}
