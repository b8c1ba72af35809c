"""Whose a holder is and what its makers say, as every format of the exposition shows it."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from exporter.model import Owner, PodFacts, PodUse, Snapshot

FOR_GOOD_SECONDS = 253_402_300_799
"""9999-12-31T23:59:59Z: how "for good" is spelt where a Unix time stands, since infinity is neither JSON nor shown."""

EXPORTED_PREFIXES = ("label_", "annotation_")
"""None of our own labels begins so: what a pod's makers write can never be taken for what we say."""

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


def owner_of(use: PodUse) -> Owner:
    """Who holds, without cost labels; without pod metadata, or until the workload is known, the namespace alone."""
    return use.facts.owner.without_cost_labels if use.facts else Owner(namespace=use.holder.namespace)


def alerts_off_until_seconds(facts: PodFacts | None) -> float | None:
    """Unix time, whole where it is whole; ``FOR_GOOD_SECONDS`` at most; ``None`` where alerts are on."""
    return shown_until_seconds(facts.opt_out_until_seconds if facts else None)


def shown_until_seconds(until: float | None) -> float | None:
    """The end of an opt-out as it is shown: ``FOR_GOOD_SECONDS`` at most; ``None`` where there is none."""
    return None if until is None or math.isnan(until) else min(until, FOR_GOOD_SECONDS)


@lru_cache(maxsize=1024)  # as many pods, each page anew; a renderer forgets them with the label sets
def exported_labels(exported: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The exported pairs that a series can carry: one wrong or repeated name would cost the whole page."""
    kept: dict[str, str] = {}
    for name, value in exported:
        if name.startswith(EXPORTED_PREFIXES) and _LABEL_NAME.fullmatch(name):
            kept.setdefault(name, value)
    return tuple(kept.items())


def problems(snapshot: Snapshot) -> dict[str, int]:
    """Pods by what in their own words could not be understood; a pod of several devices counts once."""
    pods = {
        (problem, use.holder.namespace, use.holder.pod)
        for view in snapshot.devices
        for use in view.pods
        if use.facts
        for problem in use.facts.problems
    }
    counts: dict[str, int] = {}
    for problem, _, _ in sorted(pods):
        counts[problem] = counts.get(problem, 0) + 1
    return counts
