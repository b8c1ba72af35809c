"""Whose a holder is, in a few words beside its pod; everything that comes from outside is escaped here."""

from exporter.exposition.page_text import chip, moment, text, words
from exporter.exposition.tenants import FOR_GOOD_SECONDS, alerts_off_until_seconds
from exporter.model import Owner, PodFacts, PodUse, Snapshot

_SOURCE_WORDS = {
    "annotation": ("by annotation", "its share is as its annotations declare it, and nobody enforces it"),
    "job-mapping": ("by job mapping", "from the files in which the workload manager lists jobs by GPU"),
    "process": ("by processes", "it runs there; nothing allocates GPUs on this node"),
}


def source(use: PodUse) -> str:
    """How the holder is known, where that is not the usual way. Safe."""
    name = use.holder.source
    if name == "device-plugin":
        return ""
    shown, meaning = _SOURCE_WORDS.get(name, (name, ""))
    return f'<span title="{text(meaning)}">{text(shown)}</span>' if meaning else text(shown)


def named(namespace: str, name: str) -> str:
    """``vision/resnet-0``, the name in bold; the name alone outside of Kubernetes. Safe."""
    return f"{text(namespace)}/<b>{text(name)}</b>" if namespace else f"<b>{text(name)}</b>"


def pod_name(use: PodUse) -> str:
    """The holder's pod. Safe."""
    return named(use.holder.namespace, use.holder.pod)


def workload(owner: Owner) -> str:
    """``Job resnet``; empty where the namespace is all that is known. Safe."""
    return text(f"{owner.kind} {owner.name}".strip()) if owner.name else text(owner.kind)


def whose(use: PodUse, snapshot: Snapshot) -> str:
    """Workload, team, queue and class, and until when alerts are off; empty where nothing of it is known. Safe."""
    facts = use.facts
    if facts is None:
        return '<span class="dim">owner not known yet</span>' if snapshot.metadata_known else ""
    owner = facts.owner
    parts = [
        _beside(use.holder.pod, owner),
        f"team {text(owner.team)}" if owner.team else "",
        f"queue {text(facts.queue)}" if facts.queue else "",
        text(facts.workload_class),
        ", ".join(f"not understood: {words(problem)}" for problem in facts.problems),
    ]
    shown = " · ".join(part for part in parts if part)
    return " ".join(part for part in (shown, alerts_off(facts, snapshot.taken_at_seconds)) if part)


def _beside(pod: str, owner: Owner) -> str:
    """The workload without what the pod's name already says."""
    if owner.name != pod:
        return workload(owner)
    return "" if owner.kind == "Pod" else text(owner.kind)


def alerts_off(facts: PodFacts | None, now: float) -> str:
    """That waste alerts leave the pod alone, and until when; empty where they do not, or no longer. Safe."""
    until = alerts_off_until_seconds(facts)
    if until is None or until <= now:
        return ""
    # A chip sets its parts side by side: words and time must be one part to be broken as text is.
    return chip("free", "alerts off" if until >= FOR_GOOD_SECONDS else f"<span>alerts off until {moment(until)}</span>")
