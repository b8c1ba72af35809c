"""Checks what the API says of those who hold GPUs: whose they are, and whether the node's labels are right."""

import re
from collections.abc import Callable, Sequence

from exporter.config import AgentConfig
from exporter.doctor import kubelet
from exporter.doctor.finding import Finding, ok, warn
from exporter.model import Attribution, NodeFacts, PodFacts, Reading

_SHOWN = 3
# Of a product's name what says nothing of the model: memory, form and ways of sharing.
_NO_MODEL = re.compile(
    r"[0-9]+g[bi]?b?|sxm[0-9]*|hbm[0-9]*[a-z]*|pcie|nvl[0-9]*|mig|[0-9]{1,3}c?[0-9]{0,3}g\.[0-9]{1,6}gb", re.ASCII
)


def of_holders(
    config: AgentConfig, attribution: Attribution, facts_of: Callable[[str, str], PodFacts | None]
) -> Finding:
    """Every pod that holds a GPU should have an owner with a team, and say nothing that cannot be understood."""
    name = "owners"
    pods = sorted(kubelet.holders(attribution))
    facts = {pod: facts_of(*pod) for pod in pods}
    unknown = [pod for pod in pods if facts[pod] is None]
    without_team = [pod for pod, known in facts.items() if known and not known.owner.team]
    wrong = {pod: known.problems for pod, known in facts.items() if known and known.problems}
    of = f"of {len(pods)} pods that hold GPUs"
    if unknown:
        return warn(
            name,
            f"{len(unknown)} {of} are not known to the API: {_some(unknown)}",
            "they are charged to themselves; see that --node-name is this node and the kubelet is this cluster's",
        )
    if wrong:
        pod, problems = next(iter(wrong.items()))
        said = ", ".join(problems).replace("_", " ")
        return warn(
            name,
            f"{len(wrong)} {of} say what cannot be understood: {'/'.join(pod)} ({said})",
            "mend the pod's label or annotation; of a controller of an unknown kind name the team; see docs/owners.md",
        )
    if without_team:
        keys = ", ".join(config.team_keys) or "nothing yet: --team-keys names the labels"
        where = "the pod or its namespace" if config.namespace_teams else "the pod"
        return warn(
            name,
            f"{len(without_team)} {of} have no team: {_some(without_team)}",
            f"label {where} with one of: {keys}",
        )
    return ok(name, f"owner and team known of all {len(pods)} pods that hold GPUs")


def node_labels(facts: NodeFacts | None, reading: Reading | None) -> Finding:
    """The product in the node's labels should be the driver's model; prices go by the driver's word."""
    name = "node labels"
    if facts is None:
        return warn(
            name,
            "cannot be read: GPUs are unpriced where the price may depend on them",
            "grant verb get on resource nodes, or set --instance-type, --capacity-type and --region",
        )
    known = (facts.instance_type, facts.capacity_type, facts.region, facts.gpu_product)
    told = ", ".join(filter(None, known)) or "say nothing of instance type, capacity type, region and GPU product"
    models = sorted({gpu.gpu.model for gpu in reading.gpus}) if reading else []
    if models and not any(_is_same(facts.gpu_product, model) for model in models):
        return warn(
            name,
            f"say {facts.gpu_product}, the driver says {', '.join(models)}",
            "the labels are of an earlier GPU: restart gpu-feature-discovery on this node",
        )
    return ok(name, told)


def _is_same(product: str, model: str) -> bool:
    """Tell whether two spellings can mean one model; a label without a model's number is never wrong."""
    named = [word for word in _words(product) if any(map(str.isdigit, word)) and not _NO_MODEL.fullmatch(word)]
    return not named or named[0] in _words(model)


def _words(text: str) -> list[str]:
    return re.split(r"[\s_-]+", text.lower())


def _some(pods: Sequence[tuple[str, str]]) -> str:
    names = ", ".join("/".join(pod) for pod in pods[:_SHOWN])
    return f"{names} and {len(pods) - _SHOWN} more" if len(pods) > _SHOWN else names
