"""Fractions of GPUs that a pod holds on behalf of others: KAI and Run:ai."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from exporter.attribution.entries import ANNOTATION, MIB, Declared, Entry, undecided
from exporter.attribution.evidence import Evidence
from exporter.model import PodMetadata

FRACTION: Final = "gpu-fraction"
MEMORY: Final = "gpu-memory"
CONTAINER: Final = "gpu-fraction-container-name"
KEYS: Final = frozenset({FRACTION, MEMORY, CONTAINER})
"""Annotations that are read."""
GROUP: Final = "runai-gpu-group"
"""Label of the pod that holds the GPU and of those who have fractions of it; with several GPUs, ``<this>/<group>``."""
RESOURCE: Final = "gpu-fraction"

_RATIO = re.compile(r"[0-9]{0,9}(?:\.[0-9]{0,18})?", re.ASCII)
_MIB_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


class Groups:
    """Who has fractions of which group's GPU.

    Args:
        evidence: Its pods must be known.
        containers: (namespace, pod) to the names of its containers without devices.
        with_devices: (namespace, pod) of the others that the kubelet lists.
    """

    def __init__(
        self,
        evidence: Evidence,
        containers: Mapping[tuple[str, str], list[str]],
        with_devices: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._containers = containers
        self._pods = evidence.pods or {}
        self._members: dict[str, list[PodMetadata]] = {}
        self._awaited: set[str] = set()
        """Groups with a member that the kubelet does not list yet."""
        listed = {*containers, *with_devices}
        for name, pod in self._pods.items():
            if pod.namespace in evidence.reservation_namespaces or name in evidence.ended or name == evidence.own_pod:
                continue
            for group in _groups(pod):
                if name in listed or (evidence.is_followed and not containers):
                    self._members.setdefault(group, []).append(pod)
                elif evidence.is_followed:  # else it may have ended meanwhile, which only the kubelet knows
                    self._awaited.add(group)
        seen = {*self._pods, *evidence.ended, evidence.own_pod}
        self._may_lack_members = not evidence.is_followed and any(name not in seen for name in containers)

    def divided(self, entry: Entry) -> Iterator[Entry]:
        """Give the entries of those for whom a reservation pod holds a device.

        Args:
            entry: Of a pod in a reservation namespace. One that reserves for nobody by its labels keeps it.
        """
        pod = self._pods.get(entry.holder[:2])
        if pod is None:
            yield replace(entry, parsed=undecided(entry.parsed, "reservation_pending"))
            return
        groups = _groups(pod)
        if not groups:
            yield entry
        elif self._may_lack_members or groups & self._awaited:
            yield replace(entry, parsed=undecided(entry.parsed, "reservation_pending"))
        members = {(one.namespace, one.name): one for group in groups for one in self._members.get(group, ())}
        for member in members.values():
            declared, reason = _declared(member)
            yield replace(
                entry,
                holder=(member.namespace, member.name, self._container(member)),
                resource=RESOURCE,
                source=ANNOTATION,
                parsed=undecided(entry.parsed, reason) if reason else entry.parsed,
                declared=declared,
            )

    def _container(self, member: PodMetadata) -> str:
        named = member.annotations.get(CONTAINER, "")
        listed = self._containers.get((member.namespace, member.name), [])
        if named or len(listed) != 1:
            return named
        return listed[0]


def _groups(pod: PodMetadata) -> frozenset[str]:
    several = {key.removeprefix(f"{GROUP}/") for key in pod.labels if key.startswith(f"{GROUP}/")}
    single = pod.labels.get(GROUP, "")
    return frozenset(several | {single}) - {""}


def _declared(member: PodMetadata) -> tuple[Declared | None, str]:
    """Give what a pod asked for, or why that cannot be said."""
    fraction, memory = member.annotations.get(FRACTION), member.annotations.get(MEMORY)
    if fraction is not None:
        ratio = float(fraction) if _RATIO.fullmatch(fraction) and fraction.strip(".") else 0.0
        return (Declared(ratio=ratio), "") if ratio > 0 else (None, "bad_annotation")
    if memory is not None:
        mib = int(memory) if _MIB_NUMBER.fullmatch(memory) else 0
        return (Declared(memory_bytes=mib * MIB), "") if mib > 0 else (None, "bad_annotation")
    return None, "needs_annotation"
