"""What dcgm-exporter and kube-state-metrics would show of a shape, for the public rules; where in doubt, at their best.

Labels are honoured, a shared GPU is shown once per holder (``KUBERNETES_VIRTUAL_GPUS``), profiling fields are collected
and cost nothing, and a restart of dcgm-exporter loses no more than the scrapes that our agent's restart loses.
"""

from collections.abc import Iterable, Iterator, Mapping

from corpus_series import Page
from corpus_support import NEVER_ENDS, Board, Pod, Shape, Track, Use, Workload, combine

IDLE_WATTS, BUSY_WATTS = 75.0, 600.0
_BETWEEN = {"Deployment": ("ReplicaSet", "replicaset"), "CronJob": ("Job", "job_name")}
"""Kinds that do not own their pods themselves: what stands between, and its label."""


class PublicPage(Page):
    """Adds what the public exporters show of one shape."""

    def everything(self) -> None:
        for board in self.shape.boards:
            held = [
                (pod, use)
                for work in self.shape.workloads
                for pod in work.pods
                for use in pod.uses
                if use.board == board
            ]
            for pod, use in held:
                self.device(pod, use)
            if not any(use.profile for _, use in held):
                self.free(board, held)
        for workload in self.shape.workloads:
            self.owner(workload)
            for pod in workload.pods:
                self.kubernetes(workload, pod)

    def device(self, pod: Pod, use: Use) -> None:
        """Fields of a device, with the pod's labels as long as it is held."""
        labels = _labels(use.board, use.instance, use.profile) | {
            "namespace": pod.namespace,
            "pod": pod.name,
            "container": "main",
        }
        here = [pod.start <= t < pod.end for t in self.times]
        if use.util is not None:
            percent = self._live(here, use.util, lambda value: float(round(100 * value)))
            self.scraped("DCGM_FI_DEV_GPU_UTIL", use.board, labels, percent)
            beside = combine([use.part, use.util], _beside)
            video = self._live(here, beside, lambda value: float(round(100 * value)))
            self.scraped("DCGM_FI_DEV_ENC_UTIL", use.board, labels, video)
        self.scraped("DCGM_FI_PROF_GR_ENGINE_ACTIVE", use.board, labels, self._live(here, use.engine, float))
        watts = self._live(here, use.part, lambda value: IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * value)
        self.scraped("DCGM_FI_DEV_POWER_USAGE", use.board, labels, watts)

    def _live(self, here: Iterable[bool], track: Track, of: object) -> Iterator[float | None]:
        assert callable(of)
        seen = track.with_unknown(self.agents.driverless)
        for there, t in zip(here, self.times, strict=True):
            value = seen.at(t) if there else None
            yield None if value is None else of(value)

    def free(self, board: Board, held: list[tuple[Pod, Use]]) -> None:
        """A GPU that nobody holds is there as well, at 0, without a pod."""
        idle = [None if any(pod.start <= t < pod.end for pod, _ in held) else 0.0 for t in self.times]
        self.scraped("DCGM_FI_DEV_GPU_UTIL", board, _labels(board), idle)
        self.scraped("DCGM_FI_PROF_GR_ENGINE_ACTIVE", board, _labels(board), idle)

    def scraped(self, name: str, board: Board, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series with the labels of the target that the exporter does not have itself."""
        seen = [
            value if self.agents.scraped(board.node, number, t) and t < self.shape.lasts else None
            for number, (t, value) in enumerate(zip(self.times, values, strict=True))
        ]
        target = {"job": "dcgm-exporter", "instance": f"{board.node}:9400"}
        self.series.add(name, {**labels, **target}, seen)

    def owner(self, workload: Workload) -> None:
        """Owners of owners, where a workload has a ReplicaSet or a Job between itself and its pods."""
        between, owned = _BETWEEN.get(workload.kind, ("", ""))
        if between:
            labels = {
                "namespace": workload.namespace,
                owned: f"{workload.name}-1",
                "owner_kind": workload.kind,
                "owner_name": workload.name,
                "owner_is_controller": "true",
                "job": "kube-state-metrics",
            }
            name = f"kube_{between.lower()}_owner"
            self.series.add(name, labels, (1.0 if t < self.shape.lasts else None for t in self.times))

    def kubernetes(self, workload: Workload, pod: Pod) -> None:
        """What kube-state-metrics says of a pod; labels and annotations are those that it was told to show."""
        labels = {"namespace": pod.namespace, "pod": pod.name, "uid": pod.uid, "job": "kube-state-metrics"}
        here = [pod.start <= t < pod.end for t in self.times]
        count = float(sum(1 for use in pod.uses))
        requests = {**labels, "container": "main", "node": pod.uses[0].board.node, "unit": "integer"}
        requests["resource"] = "".join(letter if letter.isalnum() else "_" for letter in pod.resource)
        phase = [float(pod.running_from <= t) if there else None for t, there in zip(self.times, here, strict=True)]
        self.series.add("kube_pod_status_phase", {**labels, "phase": "Running"}, phase)
        self.series.add("kube_pod_created", labels, [pod.start if there else None for there in here])
        there = [1.0 if here_now else None for here_now in here]
        if workload.kind == "Pod":
            nobody = dict.fromkeys(("owner_kind", "owner_name", "owner_is_controller"), "<none>")
            self.series.add("kube_pod_owner", {**labels, **nobody}, there)
        else:
            between = _BETWEEN.get(workload.kind, ("", ""))[0]
            name = f"{workload.name}-1" if between else pod.owner
            owner = {"owner_kind": between or workload.kind, "owner_name": name, "owner_is_controller": "true"}
            self.series.add("kube_pod_owner", {**labels, **owner}, there)
        if workload.policy:
            shown = {**labels, "label_gpu_cost_exporter_workload_class": workload.policy}
            self.series.add("kube_pod_labels", shown, there)
        if pod.alerts_off_until == NEVER_ENDS:
            self.series.add(
                "kube_pod_annotations", {**labels, "annotation_gpu_cost_exporter_alerts": "disabled"}, there
            )
        if pod.resource != "dra":
            values = [count if there else None for there in here]
            self.series.add("kube_pod_container_resource_requests", requests, values)


def _beside(values: list[float | None]) -> float | None:
    """What is at work beside the engine of which the utilisation speaks."""
    part, util = values
    return None if part is None or util is None else max(0.0, part - util)


def _labels(board: Board, instance: str = "", profile: str = "") -> dict[str, str]:
    return {
        "gpu": str(board.index),
        "UUID": board.uuid,
        "device": f"nvidia{board.index}",
        "modelName": board.model,
        "GPU_I_PROFILE": profile,
        "GPU_I_ID": instance,
        "Hostname": board.node,
    }


def add(shape: Shape, series: object) -> None:
    """Add the public exporters' series of a shape."""
    PublicPage(shape, series).everything()  # type: ignore[arg-type]
