"""Reads the alert policy of a pod from its annotations: workload class and opt-out."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import inf

_HASH_DIGITS = 8


def label_text(text: str, limit: int) -> str:
    """Trim a text and limit its length.

    Args:
        text: Any text, also with lone surrogates and control characters.
        limit: Maximum length of the result, at least 10.

    Returns:
        Printable text: each run of white space is one space, unprintable characters are left out. A longer text is cut
        and ends in ``-`` and eight digits of its hash, so two long texts with the same beginning stay distinct.
    """
    if not text.isprintable():
        text = "".join(character for character in text if character.isprintable() or character.isspace())
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    digest = sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{text[: limit - _HASH_DIGITS - 1]}-{digest}"


CLASS_KEY = "gpu-cost-exporter/workload-class"
ALERTS_KEY = "gpu-cost-exporter/alerts"
ALERTS_UNTIL_KEY = "gpu-cost-exporter/alerts-until"
KEYS = frozenset({CLASS_KEY, ALERTS_KEY, ALERTS_UNTIL_KEY})

BATCH = "batch"
INTERACTIVE = "interactive"
INFERENCE = "inference"
RESERVED = "reserved"
_CLASSES = frozenset({BATCH, INTERACTIVE, INFERENCE, RESERVED})

_KINDS_OF_CLASS = {
    INTERACTIVE: "Notebook JupyterHub",
    INFERENCE: "InferenceService LLMInferenceService KnativeService RayService",
    BATCH: (
        "Job CronJob JobSet RayJob RayCronJob VolcanoJob PodGroup Workflow SparkApplication Spark "
        "PyTorchJob TFJob MPIJob XGBoostJob PaddleJob JAXJob MXJob AscendJob TrainJob"
    ),
}
_CLASS_OF_KIND = {kind: name for name, kinds in _KINDS_OF_CLASS.items() for kind in kinds.split()}
# Of a LeaderWorkerSet or a Deployment: the kind does not imply serving, these labels do.
_SERVING_LABELS = ("llm-d.ai/role", "serving.kserve.io/inferenceservice")

_ALERTS = {"disabled": inf, "enabled": -inf}
"""Unix times at which an opt-out ends."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_LONGEST_WORD = 64
_DAY = timedelta(days=1).total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The parsed policy; ``problems`` names the parts that could not be parsed."""

    workload_class: str = ""
    opt_out_until_seconds: float | None = None
    """Unix time; ``inf`` is permanent, ``None`` means no opt-out."""
    problems: tuple[str, ...] = ()


def policy_of(kind: str, pod: tuple[Mapping[str, str], ...], namespace: tuple[Mapping[str, str], ...]) -> Policy:
    """Read the workload class and the opt-out.

    Args:
        kind: Kind of the owner; it implies the class if no label or annotation sets one.
        pod: The pod's labels and annotations, in this order.
        namespace: The namespace's, in this order; they count where the pod has no valid value.

    Returns:
        The policy. An invalid value has no effect except a problem: ``bad_workload_class``, ``bad_opt_out``.
    """
    problems: list[str] = []
    implied = INFERENCE if any(key in pod[0] for key in _SERVING_LABELS) else _CLASS_OF_KIND.get(kind, "")
    classes = list(_words((*pod, *namespace), CLASS_KEY))
    workload_class = next((word for word in classes if word in _CLASSES), implied)
    if classes and classes[0] not in _CLASSES:
        problems.append("bad_workload_class")
    until = _opt_out(pod, problems)
    if until is None:
        until = _opt_out(namespace, problems)
    return Policy(
        workload_class=workload_class,
        opt_out_until_seconds=None if until == -inf else until,
        problems=tuple(dict.fromkeys(problems)),
    )


def _opt_out(sources: tuple[Mapping[str, str], ...], problems: list[str]) -> float | None:
    """Return the latest end that the values of a pod or a namespace set; ``-inf`` for an enabled alert."""
    ends = [_ALERTS.get(word) for word in _words(sources, ALERTS_KEY)]
    ends += [_time(word) for word in _words(sources, ALERTS_UNTIL_KEY)]
    if None in ends:
        problems.append("bad_opt_out")
    return max((end for end in ends if end is not None), default=None)


def _words(sources: tuple[Mapping[str, str], ...], key: str) -> Iterator[str]:
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
