"""The form of an entry of the catalogue, and the labels that entries have together."""

from dataclasses import dataclass

from exporter.exposition.family import Kind

DEVICE_LABELS = ("node", "gpu", "uuid", "gpu_instance", "mig_profile", "model")
"""``gpu`` is the index; ``uuid`` the GPU's or MIG instance's; the MIG labels are absent on a whole GPU."""
POD_LABELS = ("pod_namespace", "pod_name", "container_name", "pod_uid")
"""Not ``namespace``, ``pod``, ``container``: those collide with Prometheus' target labels. ``pod_uid`` when known."""
OWNER_LABELS = ("node", "workload_namespace", "workload_kind", "workload_name", "team", "cost_labels", "model", "mode")
"""Who pays, for which model, in which mode: exclusive, mig, shared. What is not known of an owner is absent."""

WORKLOAD_LABELS = ("node", "workload_namespace", "workload_kind", "workload_name", "team")
"""Who holds; a pod whose workload is not known stands for itself, with the kind Pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Name, type, help (with unit and source) and label names of one metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    """Of labels that come behind those, by allow-list: the pods' own."""


def of_device(name: str, text: str, *labels: str, kind: Kind = Kind.GAUGE) -> Metric:
    """A metric of a GPU or MIG instance."""
    return Metric(name=name, kind=kind, help=text, labels=(*DEVICE_LABELS, *labels))


def of_pod(name: str, text: str, *labels: str, kind: Kind = Kind.GAUGE, prefixes: tuple[str, ...] = ()) -> Metric:
    """A metric of a container that holds a device."""
    return Metric(name=name, kind=kind, help=text, labels=(*DEVICE_LABELS, *POD_LABELS, *labels), prefixes=prefixes)


def of_owner(name: str, text: str, *labels: str) -> Metric:
    """A counter of a ledger."""
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=("ledger", *OWNER_LABELS, *labels))


def of_workload(name: str, text: str, *labels: str) -> Metric:
    """A gauge of what an owner holds and uses."""
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=(*WORKLOAD_LABELS, *labels))


def plain(name: str, text: str, *labels: str, kind: Kind = Kind.GAUGE) -> Metric:
    """A metric with no labels but its own."""
    return Metric(name=name, kind=kind, help=text, labels=labels)
