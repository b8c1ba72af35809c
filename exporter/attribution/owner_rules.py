"""Derives the owner of a pod from its labels and controller with a table of rules; the first match applies.

It also derives the alert policy, workload class and opt-out, from labels and annotations.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from math import inf

from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, Owner, PodFacts, PodMetadata

_HASH_DIGITS = 8


def label_text(text: str, limit: int) -> str:
    """Trim a text and limit its length.

    Args:
        text: Any text; lone surrogates and control characters are allowed.
        limit: Maximum length of the result, at least 10.

    Returns:
        Printable text: each run of white space is one space, unprintable characters are left out. A longer text is cut
        and ends in ``-`` and eight digits of its hash, so that long texts with the same beginning stay distinct.
    """
    if not text.isprintable():
        text = "".join(character for character in text if character.isprintable() or character.isspace())
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    digest = sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{text[: limit - _HASH_DIGITS - 1]}-{digest}"


MAX_KEYS = 10
"""Maximum number of exported labels, and of exported annotations."""
MAX_CHARACTERS = 128

_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")
# These keys have a value per pod or per rollout, which would create a useless series each.
_NEVER = re.compile(r"(^|_)(uid|hash|checksum)(_|$)|job_completion_index$|statefulset_kubernetes_io_pod_name$")
_NEVER_KEYS = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})


def _exported(pod: PodMetadata, rules: "OwnerRules") -> tuple[tuple[str, str], ...]:
    """Return the allowed labels and annotations of a pod as (label name, value), sorted by name.

    Names start with ``label_`` or ``annotation_``. Numbers of clashing names depend on the allow-list and not on the
    pod, so other labels of a pod never change a name. Empty values are left out.
    """
    names = [
        *((name, pod.labels.get(key, "")) for key, name in export_names("label", rules.exported_labels).items()),
        *(
            (name, pod.annotations.get(key, ""))
            for key, name in export_names("annotation", rules.exported_annotations).items()
        ),
    ]
    cut = ((name, label_text(value, MAX_CHARACTERS)) for name, value in names)
    return tuple(sorted((name, value) for name, value in cut if value))


def export_names(prefix: str, keys: Sequence[str]) -> dict[str, str]:
    """Map the exportable keys to names in snake case; clashing names get ``_conflict1``, ``_conflict2`` in order."""
    shown = [key for key in dict.fromkeys(keys) if not is_never_shown(key)][:MAX_KEYS]
    plain = {key: f"{prefix}_{_sanitised(key)}" for key in sorted(shown)}
    clashing = {name for name, times in Counter(plain.values()).items() if times > 1}
    taken = {*plain.values()} - clashing
    names: dict[str, str] = {}
    for key, name in plain.items():
        numbered = (f"{name}_conflict{number}" for number in count(1))
        names[key] = next(free for free in numbered if free not in taken) if name in clashing else name
        taken.add(names[key])
    return names


def is_never_shown(key: str) -> bool:
    """Return whether a key is never exported, even from the allow-list: UIDs, hashes, checksums and similar keys."""
    return key in _NEVER_KEYS or _NEVER.search(_sanitised(key)) is not None


def _sanitised(key: str) -> str:
    return _CAMEL.sub(r"\1_\2", _INVALID.sub("_", key)).lower()


MAX_NAME = 253
MAX_KIND = 63
MAX_TEAM = 128

# Values that the API server accepts; other texts could make the pairs ambiguous.
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)

Workload = tuple[str, str]
"""Kind and name of a workload."""
Rule = Callable[[PodMetadata], Workload | None]

_OUR_KINDS = frozenset({UNALLOCATED.kind, UNATTRIBUTED.kind})
_GROUP_NAME = "scheduling.k8s.io/group-name"
_RAY_KINDS = frozenset({"RayJob", "RayService", "RayCluster", "RayCronJob"})
_TRAINING_KINDS = ("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "MXJob", "AscendJob")
_KIND_OF_OPERATOR = {"mpi-operator": "MPIJob", **{f"{kind.lower()}-controller": kind for kind in _TRAINING_KINDS}}
# Name of a group that Volcano creates for pods without a group; for a Deployment, one per ReplicaSet.
_GENERATED_GROUP = re.compile(r"podgroup-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_CRON_RUN = re.compile(r"(.+)-(\d{8,10})", re.ASCII)
_ORDINAL = re.compile(r"(.+)-\d+", re.ASCII)
_MINUTES_2015 = 23_667_840
_MINUTES_2100 = 68_374_080

_QUEUE_LABELS = (
    "kueue.x-k8s.io/local-queue-name",
    "kueue.x-k8s.io/queue-name",
    "kueue.x-k8s.io/cluster-queue-name",
    "kai.scheduler/queue",
    "volcano.sh/queue-name",
    "runai/queue",
)
# Kinds from ``_controller`` that have no unknown creator; any other kind may have one.
_KNOWN_KINDS = _RAY_KINDS.union(
    _TRAINING_KINDS,
    ("", "DaemonSet", "ReplicaSet", "ReplicationController", "Node", "LeaderWorkerSet", "JobSet", "InferenceService"),
    ("Notebook", "Workflow", "SparkApplication", "DaskCluster", "RunaiJob"),
)
_QUEUE_ANNOTATIONS = ("volcano.sh/queue-name", "scheduling.volcano.sh/queue-name")


CLASS_KEY = "gpu-cost-exporter/workload-class"
ALERTS_KEY = "gpu-cost-exporter/alerts"
ALERTS_UNTIL_KEY = "gpu-cost-exporter/alerts-until"

_KINDS_OF_CLASS = {
    "interactive": "Notebook JupyterHub",
    "inference": "InferenceService LLMInferenceService KnativeService RayService",
    "reserved": "",
    "batch": (
        "Job CronJob JobSet RayJob RayCronJob VolcanoJob PodGroup Workflow SparkApplication Spark "
        "PyTorchJob TFJob MPIJob XGBoostJob PaddleJob JAXJob MXJob AscendJob TrainJob"
    ),
}
_CLASS_OF_KIND = {kind: name for name, kinds in _KINDS_OF_CLASS.items() for kind in kinds.split()}
# Labels that imply serving, unlike the kinds that have them: LeaderWorkerSet and Deployment.
_SERVING_LABELS = ("llm-d.ai/role", "serving.kserve.io/inferenceservice")

_ALERTS = {"disabled": inf, "enabled": -inf}
"""Unix times of the end of an opt-out, by word."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_LONGEST_WORD = 64
_DAY = timedelta(days=1).total_seconds()

_Texts = tuple[Mapping[str, str], ...]
"""Labels and annotations of one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRules:
    """Configurable part of the rules; the order of the workload rules is fixed."""

    team_keys: tuple[str, ...] = ()
    """Keys of labels or annotations with the team; the first key with a value applies."""
    cost_labels: tuple[str, ...] = ()
    """Keys of the labels that divide the ledger; of the pod, otherwise of its namespace."""
    exported_labels: tuple[str, ...] = ()
    exported_annotations: tuple[str, ...] = ()


def facts_of(
    pod: PodMetadata,
    namespace_labels: Mapping[str, str],
    namespace_annotations: Mapping[str, str],
    rules: OwnerRules,
) -> PodFacts:
    """Return the owner of a pod and its alert policy.

    Args:
        pod: Metadata as the API returns it; any text is allowed.
        namespace_labels: Labels of its namespace; empty if namespaces are not read.
        namespace_annotations: Annotations of its namespace, likewise.
        rules: Keys of teams and of exported labels.

    Returns:
        The facts, independent of the order of labels; every text is printable and limited in length.
    """
    kind, name = workload_of(pod)
    own, namespaces = (pod.labels, pod.annotations), (namespace_labels, namespace_annotations)
    team = _first((*own, *namespaces), rules.team_keys, MAX_TEAM)
    queue = _first((pod.labels,), _QUEUE_LABELS, MAX_NAME) or _first((pod.annotations,), _QUEUE_ANNOTATIONS, MAX_NAME)
    problems: list[str] = []
    workload_class = _class_of(kind, own, namespaces, problems)
    until = _opt_out(own, problems)
    if until is None:
        until = _opt_out(namespaces, problems)
    problems += _doubts(pod, ((name, MAX_NAME), (team, MAX_TEAM), (queue, MAX_NAME)))
    return PodFacts(
        owner=Owner(
            namespace=label_text(pod.namespace, MAX_NAME),
            kind=kind,
            name=name,
            team=team,
            cost_labels=_cost_labels(pod.labels, namespace_labels, rules.cost_labels),
        ),
        queue=queue,
        workload_class=workload_class,
        opt_out_until_seconds=None if until == -inf else until,
        exported=_exported(pod, rules),
        pod_uid=pod.uid,
        problems=tuple(dict.fromkeys(problems)),
    )


def wanted_annotations(rules: OwnerRules) -> frozenset[str]:
    """Return the annotation keys of pods and namespaces that ``facts_of`` reads; others need not be kept."""
    own = {CLASS_KEY, ALERTS_KEY, ALERTS_UNTIL_KEY, _GROUP_NAME}
    return frozenset(own.union(rules.team_keys, rules.exported_annotations, _QUEUE_ANNOTATIONS))


def workload_of(pod: PodMetadata) -> Workload:
    """Return kind and name of the workload of a pod, or of the pod itself if no rule matches."""
    for rule in RULES:
        if (workload := rule(pod)) is not None:
            return workload
    return "Pod", label_text(pod.name, MAX_NAME)


def _doubts(pod: PodMetadata, shown: tuple[tuple[str, int], ...]) -> Iterator[str]:
    """Yield the reasons that make an owner uncertain: altered texts, a controller of an unknown kind.

    Args:
        pod: The pod of the owner.
        shown: Shown texts, each with its limit.
    """
    if any(len(text) == limit for text, limit in shown):
        yield "text_too_long"
    if any("\ufffd" in text for text, _ in shown):  # replaces invalid UTF-8 in JSON
        yield "text_unreadable"
    kind, _ = _controller_of(pod)
    if kind not in _KNOWN_KINDS and all(rule(pod) is None for rule in RULES if rule is not _controller):
        yield "unknown_kind"


def _class_of(kind: str, own: _Texts, namespaces: _Texts, problems: list[str]) -> str:
    """Return the workload class that the pod or its namespace sets, or that its labels or kind imply."""
    words = list(_words((*own, *namespaces), CLASS_KEY))
    if words and words[0] not in _KINDS_OF_CLASS:
        problems.append("bad_workload_class")
    is_serving = any(key in own[0] for key in _SERVING_LABELS)
    implied = "inference" if is_serving else _CLASS_OF_KIND.get(kind, "")
    return next((word for word in words if word in _KINDS_OF_CLASS), implied)


def _opt_out(sources: _Texts, problems: list[str]) -> float | None:
    """Return the latest end of an opt-out in the values of a pod or a namespace; ``-inf`` for enabled alerts."""
    ends = [_ALERTS.get(word) for word in _words(sources, ALERTS_KEY)]
    ends += [_time(word) for word in _words(sources, ALERTS_UNTIL_KEY)]
    if None in ends:
        problems.append("bad_opt_out")
    return max((end for end in ends if end is not None), default=None)


def _words(sources: _Texts, key: str) -> Iterator[str]:
    for source in sources:
        if word := label_text(source.get(key, ""), _LONGEST_WORD):
            yield word.lower()


def _time(word: str) -> float | None:
    is_date = _DATE.fullmatch(word) is not None
    if not is_date and not _RFC3339.fullmatch(word):
        return None
    try:
        moment = datetime.fromisoformat(word.upper())
    except ValueError:
        return None
    if is_date:
        return moment.replace(tzinfo=UTC).timestamp() + _DAY
    return moment.timestamp()


def _first(sources: Iterable[Mapping[str, str]], keys: tuple[str, ...], limit: int) -> str:
    texts = (label_text(source[key], limit) for source in sources for key in keys if key in source)
    return next(filter(None, texts), "")


def _cost_labels(pod: Mapping[str, str], namespace: Mapping[str, str], keys: Iterable[str]) -> str:
    """Return the cost labels of an owner, without keys that have no value in pod and namespace."""
    values = {key: pod.get(key) or namespace.get(key, "") for key in sorted({*keys})}
    return ",".join(f"{key}={value}" for key, value in values.items() if _LABEL_VALUE.fullmatch(value))


def _label(pod: PodMetadata, *keys: str) -> str:
    return _first((pod.labels,), keys, MAX_NAME)


def _named(kind: str, name: str) -> Workload | None:
    return (kind, name) if kind and name else None


def _labelled(kind: str, *keys: str) -> Rule:
    """Return a rule that takes the name of the workload from the first label with a value."""
    return lambda pod: _named(kind, _label(pod, *keys))


def _ray(pod: PodMetadata) -> Workload | None:
    kind = _label(pod, "ray.io/originated-from-crd")
    return _named(kind if kind in _RAY_KINDS else "", _label(pod, "ray.io/originated-from-cr-name"))


def _training(pod: PodMetadata) -> Workload | None:
    kind = _KIND_OF_OPERATOR.get(_label(pod, "training.kubeflow.org/operator-name"), "")
    if not kind and _api_group(pod) == "kubeflow.org":
        kind, _ = _controller_of(pod)
    return _named(kind, _label(pod, "training.kubeflow.org/job-name"))


def _llm_service(pod: PodMetadata) -> Workload | None:
    if _label(pod, "app.kubernetes.io/part-of") != "llminferenceservice":
        return None
    return _named("LLMInferenceService", _label(pod, "app.kubernetes.io/name"))


def _volcano_job(pod: PodMetadata) -> Workload | None:
    kind, name = _controller_of(pod)
    return _named("VolcanoJob", name) if kind == "Job" and _api_group(pod) == "batch.volcano.sh" else None


def _pod_group(pod: PodMetadata) -> Workload | None:
    name = _first((pod.annotations,), (_GROUP_NAME,), MAX_NAME)
    return None if _GENERATED_GROUP.fullmatch(name) else _named("PodGroup", name)


def _job(pod: PodMetadata) -> Workload | None:
    kind, name = _controller_of(pod)
    if not kind:  # others set job-name on pods too, so it counts only for pods of a deleted Job
        name = _label(pod, "batch.kubernetes.io/job-name", "job-name")
    elif kind != "Job":
        return None
    run = _CRON_RUN.fullmatch(name)
    if run and _MINUTES_2015 <= int(run[2]) < _MINUTES_2100:
        return "CronJob", run[1]
    return _named("Job", name)


def _stateful_set(pod: PodMetadata) -> Workload | None:
    kind, name = _controller_of(pod)
    if kind == "StatefulSet" and name:
        return kind, name
    member = "" if kind else _label(pod, "statefulset.kubernetes.io/pod-name")
    ordinal = _ORDINAL.fullmatch(member)
    return ("StatefulSet", ordinal[1]) if ordinal else None


def _replica_set(pod: PodMetadata) -> Workload | None:
    kind, name = _controller_of(pod)
    if kind != "ReplicaSet":
        return None
    for key, maker in (("pod-template-hash", "Deployment"), ("rollouts-pod-template-hash", "Rollout")):
        template = _label(pod, key)
        deployment = name.removesuffix(f"-{template}")
        if template and deployment not in {name, ""}:
            return maker, deployment
    return None


def _lone_group(pod: PodMetadata) -> Workload | None:
    kind, _ = _controller_of(pod)
    # Kueue groups the pods of a StatefulSet too; the name of the set is better for them.
    return None if kind else _named("PodGroup", _label(pod, "kueue.x-k8s.io/pod-group-name"))


def _controller(pod: PodMetadata) -> Workload | None:
    kind, name = _controller_of(pod)
    return None if kind in _OUR_KINDS else _named(kind, name)


def _controller_of(pod: PodMetadata) -> Workload:
    return label_text(pod.owner_kind, MAX_KIND), label_text(pod.owner_name, MAX_NAME)


def _api_group(pod: PodMetadata) -> str:
    group, _, _ = pod.owner_api.rpartition("/")
    return group


# Controllers come before the Jobs, StatefulSets and ReplicaSets that they create. PodGroups come after all named
# workloads, because most controllers create a PodGroup for their scheduler, with a new name for each run.
RULES: tuple[Rule, ...] = (
    _ray,
    _labelled("RayCluster", "ray.io/cluster"),
    _labelled("LeaderWorkerSet", "leaderworkerset.sigs.k8s.io/name"),
    _labelled("JobSet", "jobset.sigs.k8s.io/jobset-name"),
    _training,
    _labelled("InferenceService", "serving.kserve.io/inferenceservice", "inferenceservice"),
    _llm_service,
    _labelled("KnativeService", "serving.knative.dev/service"),
    _labelled("Notebook", "notebook-name"),
    _labelled("VolcanoJob", "volcano.sh/job-name"),
    _volcano_job,
    _labelled("Workflow", "workflows.argoproj.io/workflow"),
    _labelled("SparkApplication", "sparkoperator.k8s.io/app-name"),
    _labelled("Spark", "spark-app-name", "spark-app-selector"),
    _labelled("DaskCluster", "dask.org/cluster-name"),
    _labelled("JupyterHub", "hub.jupyter.org/username"),
    _labelled("SkyPilot", "skypilot-cluster-name", "skypilot-cluster"),
    _pod_group,
    _job,
    _stateful_set,
    _replica_set,
    _lone_group,
    _controller,
)
