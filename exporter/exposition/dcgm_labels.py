"""How labels of the drop-in family are spelled: dcgm-exporter's, and what its flags change of them."""

from dataclasses import dataclass

from exporter.model import DeviceView, Holder, Snapshot

Pairs = list[tuple[str, str | None]]

_HOLDER = ("container", "namespace", "pod")
_OLD_HOLDER = ("container_name", "pod_namespace", "pod_name")
_BY_METRIC = ("err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "health_error_code", "health_watch")

TAKEN = frozenset(
    {
        *("gpu", "UUID", "uuid", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "GPU_CI_ID"),
        *(*_HOLDER, *_OLD_HOLDER, "pod_uid", *_BY_METRIC),
    }
)
"""Names that some series of the family has in one spelling or the other: the node's name cannot have one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStyle:
    """What is chosen of the labels."""

    hostname: str = "Hostname"
    """Name of the label with the node's name; empty: there is none."""
    pod_uid: bool = False
    """Whether rows that name a pod have its ``pod_uid`` too, where it is known."""
    old_names: bool = False
    """``uuid``, ``container_name``, ``pod_name`` and ``pod_namespace``, as with dcgm-exporter's --use-old-namespace."""
    model_hyphens: bool = False
    """``NVIDIA-H100-80GB-HBM3``, as with its --replace-blanks-in-model-name."""

    engine_host: str = ""
    """Host of a DCGM engine on another machine, which stands for the node's name while DCGM alone is read."""

    def node(self, snapshot: Snapshot) -> str:
        """Return the value of the host label: the node, or the machine of a remote engine."""
        alone = all(source.name == "dcgm" or source.reason == "library_not_found" for source in snapshot.sources)
        return self.engine_host if self.engine_host and alone else snapshot.node

    def device(self, view: DeviceView, node: str, *, crowded: bool) -> Pairs:
        """What says which device a row is of; ``crowded``: of one of several compute instances of a GPU instance."""
        gpu, instance = view.gpu, view.instance
        pairs: Pairs = [
            ("gpu", str(gpu.index)),
            ("uuid" if self.old_names else "UUID", gpu.uuid),
            ("pci_bus_id", gpu.pci_bus_id),
            ("device", f"nvidia{gpu.index}"),
            ("modelName", "-".join(gpu.model.split()) if self.model_hyphens else gpu.model),
        ]
        if instance is not None:
            pairs += [("GPU_I_PROFILE", instance.profile), ("GPU_I_ID", str(instance.gpu_instance_id))]
            if crowded:
                pairs.append(("GPU_CI_ID", str(instance.compute_instance_id)))
        return [*pairs, (self.hostname, node)] if self.hostname else pairs

    def holder(self, holder: Holder) -> Pairs:
        """Who holds it, in alphabetical order of the names, as there."""
        if self.old_names:
            pairs = [
                ("container_name", holder.container),
                ("pod_name", holder.pod),
                ("pod_namespace", holder.namespace),
            ]
        else:
            pairs = [("container", holder.container), ("namespace", holder.namespace), ("pod", holder.pod)]
        return [*pairs, ("pod_uid", holder.pod_uid)] if self.pod_uid else [*pairs]


DEFAULT = LabelStyle()
"""As dcgm-exporter has them without a flag."""
