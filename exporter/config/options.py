"""Defines the options of the agent and the cost service; settings, flags, help and docs are made from this table."""

# ruff: noqa: RUF009 - the calls in the classes make their fields.

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from datetime import tzinfo
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from exporter.attribution.owner_rules import OwnerRules
from exporter.config import types
from exporter.config.types import CURRENCIES, DEFAULT_ADDRESS, ENGINE_ADDRESS, Listen, OptionType
from exporter.config.yaml_file import Raw
from exporter.metrics.dcgm_names import PREFIX, TAKEN
from exporter.model.attribution import NodeFacts

ENV_PREFIX = "GPU_COST_EXPORTER_"
_Group = TypeVar("_Group")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``key`` is its name in the file; the flag and the variable follow from it.

    ``default`` is the text of the default value; ``None`` if the option is unset by default.
    """

    key: str
    kind: OptionType
    default: str | None = None
    _: KW_ONLY
    unset: object = None
    """Value of the setting while the option is unset; an empty tuple for a list."""
    unit: str = ""
    default_note: str = ""
    help: str = ""
    group: str = ""
    """Heading of the option in help and docs."""

    @property
    def flag(self) -> str:
        """Flag, such as ``--sample-interval``."""
        return f"--{self.key}"

    @property
    def env(self) -> str:
        """Environment variable, such as ``GPU_COST_EXPORTER_SAMPLE_INTERVAL``."""
        return ENV_PREFIX + self.key.upper().replace("-", "_")

    def usage(self, also: Sequence[str] = ()) -> str:
        """Return the help of the option on a command line; ``also`` are other names of the flag."""
        default = self.default_note or self.default or "none"
        unit = f" {self.unit}" if self.unit else ""
        obvious = self.kind.words or self.kind in {types.PATH, types.NAME}
        allowed = "" if obvious else f" Allowed: {self.kind.allowed}."
        names = f" [also: {', '.join(also)}]" if also else ""
        return f"{self.help}{allowed} [default: {default}{unit}]{names}".replace("%", "%%")

    def parse(self, raw: Raw) -> object:
        """Return the value of a text, or of a list's texts.

        Raises:
            ValueError: As for ``OptionType.parse``.
        """
        if self.kind.is_list:
            items = raw.split(",") if isinstance(raw, str) else raw
            return tuple(self.kind.parse(item) for item in items)
        if not isinstance(raw, str):
            raise ValueError("a list")  # noqa: TRY004 - a list where one value belongs is the user's mistake, not a type error
        return self.kind.parse(raw)

    def refusal(self, origin: str, error: ValueError) -> str:
        """Return the problem of a text that ``parse`` refused, with the place of the text."""
        return f"{self.key} (from {origin}): {self.kind.refusal(error)}"

    def settled(self, value: object) -> object:
        """Return the value of the setting; ``None`` means that the option is unset."""
        return value if value is not None else () if self.kind.is_list else self.unset

    def setting(self, help: str) -> Any:  # noqa: A002, ANN401 - of the kind's type
        """Return the dataclass field of the option in a group of settings."""
        value = None if self.default is None else self.parse(self.default)
        return field(default=self.settled(value), metadata={"option": replace(self, help=help)})


def group(title: str, kind: type[_Group]) -> _Group:
    """Return the dataclass field of a group of settings in a configuration, with its heading."""
    return field(default_factory=kind, metadata={"title": title, "kind": kind})


def options_in(kind: type[Any], title: str) -> tuple[Option, ...]:
    """Return the options of a group of settings, with the heading."""
    return tuple(replace(one.metadata["option"], group=title) for one in fields(kind))


def options_of(configuration: type[Any]) -> tuple[Option, ...]:
    """Return the options of all groups of a configuration."""
    groups = (part.metadata for part in fields(configuration) if part.metadata)
    return tuple(option for part in groups for option in options_in(part["kind"], part["title"]))


def groups_of(configuration: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of a configuration by field; ``values`` is by option key, and ``None`` means unset."""
    return {part.name: filled(part.metadata["kind"], values) for part in fields(configuration) if part.metadata}


def filled(kind: Callable[..., _Group], values: Mapping[str, Any]) -> _Group:
    """Return a group of settings; ``values`` as for ``groups_of``."""
    options = {one.name: one.metadata["option"] for one in fields(cast("Any", kind))}
    return kind(**{name: option.settled(values[option.key]) for name, option in options.items()})


_WEB_CONFIG = Option("web-config", types.PATH, default_note="plain HTTP, no passwords")
_WEB_CONFIG_HELP = "YAML file of TLS and passwords, in Prometheus' format (docs/security.md); reloaded when it changes."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    """Settings of the log."""

    log_format: Literal["text", "json"] = Option("log-format", types.choice("text", "json"), "text").setting(
        "Form of the log on standard error; one line per event either way."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Option(
        "log-level", types.choice("debug", "info", "warning", "error"), "info"
    ).setting("Least severe event that is logged.")


def _parse_url(text: str) -> str:
    parts = types.http_parts(text)
    if any(part in {".", ".."} for part in parts.path.split("/")) or "%" in parts.path:
        raise ValueError(text)
    return parts.geturl()


URL = OptionType(
    _parse_url,
    "an address",
    "http:// or https:// with a host, a port and a path if need be, no password and no query",
    "URL",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentServingSettings:
    """Settings of the agent's web server."""

    listen: Listen = Option("listen", types.LISTEN, ":9400").setting(
        "Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets."
    )
    web_config: Path | None = _WEB_CONFIG.setting(_WEB_CONFIG_HELP)
    release_seconds: float = Option("release-seconds", types.duration(1, 3600), "60s").setting(
        "Time for which SIGUSR1 or POST /-/release closes the driver, for a GPU reset or driver upgrade."
    )
    cost_service_url: str = Option("cost-service-url", URL, unset="", default_note="no links to it").setting(
        "Address of the cost service for browsers; the page links owners to their cost, and faults to its runbook."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Settings of driver readings."""

    interval_seconds: float = Option("sample-interval", types.duration(0.2, 300), "1s").setting(
        "Time between two readings of the driver. Prometheus' scrape interval is independent of it."
    )
    source: Literal["auto", "nvml", "dcgm"] = Option("source", types.choice("auto", "nvml", "dcgm"), "auto").setting(
        "Source of readings: NVML, and DCGM if dcgm-address is set (auto); or one alone."
    )
    dcgm_address: str = Option(
        "dcgm-address", ENGINE_ADDRESS, unset="", default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm"
    ).setting("Address of nv-hostengine, by default port 5555; embedded: an engine in the agent's child process.")
    idle_threshold_ratio: float = Option("idle-threshold", types.RATIO, "0.05", unit="ratio of the device").setting(
        "A holder is idle while its activity is below this."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionSettings:
    """Settings of the holders of devices, and of the node."""

    enabled: bool = Option("attribution", types.SWITCH, "on").setting("Read the holders of devices from the kubelet.")
    kubelet_socket: str = Option("kubelet-socket", types.SOCKET, "/var/lib/kubelet/pod-resources/kubelet.sock").setting(
        "The kubelet's pod-resources socket. In a container mount its directory, never the socket itself."
    )
    kubelet_interval_seconds: float = Option("kubelet-interval", types.duration(1, 300), "5s").setting(
        "Time between two requests to the kubelet."
    )
    expiry_seconds: float = Option("attribution-expiry", types.duration(5, 3600), "60s").setting(
        "How long the kubelet's last answer is valid while it does not answer; then allocation is unknown."
    )
    gpu_resources: tuple[str, ...] = Option(
        "gpu-resources", types.RESOURCES, "nvidia.com/gpu,nvidia.com/gpu.shared,nvidia.com/mig-*,volcano.sh/vgpu-number"
    ).setting("Extended resources that are GPUs, as names or patterns. NVIDIA_RESOURCE_NAMES adds to them.")
    node_name: str = Option("node-name", types.NAME, unset="", default_note="$NODE_NAME, else the host name").setting(
        "Name of this node in labels and on the page."
    )
    proc_root: Path = Option("proc-root", types.PATH, "/proc").setting(
        "Path of the host's /proc, which maps processes to pods. Needs the host's PID namespace."
    )
    pod_log_root: Path = Option("pod-log-root", types.PATH, "/var/log/pods").setting(
        "Folder of the kubelet's pod logs; the agent reads only the directories' names, to find the pod of a uid."
    )
    workload_manager: Literal["kubernetes", "slurm", "host"] = Option(
        "workload-manager", types.choice("kubernetes", "slurm", "host"), "kubernetes"
    ).setting("Workload manager of this node: kubernetes (pods), slurm (jobs), or host (users and systemd units).")
    job_mapping_dir: Path | None = Option(
        "job-mapping-dir", types.PATH, default_note="jobs by their processes' cgroups alone"
    ).setting("Slurm: directory of files named by GPU (0, or 2.1 for an instance) with one job id per line.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """Settings of the owners of pods, from the Kubernetes API."""

    kube_metadata: bool = Option(
        "kube-metadata", types.SWITCH, "off", default_note="off; on for a simulated node"
    ).setting(
        "Read the metadata of this node's pods from the Kubernetes API: workloads, teams, queues, DRA, fractions."
    )
    kubeconfig: Path | None = Option(
        "kubeconfig", types.PATH, default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config"
    ).setting("Kubeconfig of the Kubernetes API.")
    kube_start_jitter_seconds: float = Option("kube-start-jitter", types.duration(0, 600), "60s").setting(
        "The first request to the API comes at a random time within this, to spread the load of a fleet."
    )
    team_keys: tuple[str, ...] = Option(
        "team-keys", types.KEYS, "team,owner,project,cost-center,costcenter,cost_center,department"
    ).setting("Labels or annotations that name the team; the first found on the pod, then on its namespace.")
    cost_labels: tuple[str, ...] = Option("cost-labels", types.LABEL_KEYS, default_note="none").setting(
        "Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8."
    )
    namespace_teams: bool = Option("namespace-teams", types.SWITCH, "on").setting(
        "Also read team and cost labels of the namespace; needs the right to get namespaces."
    )
    pod_labels: tuple[str, ...] = Option("pod-labels", types.KEYS, default_note="none").setting(
        "Pod labels shown on gpu_pod_info as label_<name>; at most 10."
    )
    pod_annotations: tuple[str, ...] = Option("pod-annotations", types.KEYS, default_note="none").setting(
        "Pod annotations shown on gpu_pod_info as annotation_<name>, cut to 128 characters; at most 10."
    )
    reservation_namespaces: tuple[str, ...] = Option(
        "reservation-namespaces", types.KEYS, "kai-resource-reservation,runai-reservation"
    ).setting("Namespaces of the pods that hold GPUs for fractions of KAI or Run:ai.")

    @property
    def rules(self) -> OwnerRules:
        """Return the rules that map pods to owners."""
        return OwnerRules(
            team_keys=self.team_keys,
            cost_labels=self.cost_labels,
            exported_labels=self.pod_labels,
            exported_annotations=self.pod_annotations,
        )


def _parse_hostname_label(text: str) -> object:
    """Return the name of a label, empty for none; Prometheus rejects a page with a repeated label on a line."""
    if text in TAKEN or text.startswith(PREFIX):
        raise ValueError(text, "another label of these series has that name")
    return "" if text == "none" else types.LABEL.parse(text)


HOSTNAME_LABEL = replace(types.LABEL, parse=_parse_hostname_label, allowed=f"{types.LABEL.allowed}; or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpositionSettings:
    """Settings of the page for Prometheus."""

    collectors: Path | None = Option("collectors", types.PATH, default_note="dcgm-exporter's default set").setting(
        "CSV file in dcgm-exporter's format that says which DCGM_FI_* metrics are exported; old and new names. Or"
        " wide: a preset with what dashboards of GKE, OKE and OpenShift read."
    )
    dcgm_names: Literal["legacy", "4.9"] = Option("dcgm-names", types.choice("legacy", "4.9"), "legacy").setting(
        "Spelling of the default set: names up to dcgm-exporter 4.8, or those from 4.9 on."
    )
    hostname_label: str = Option(
        "hostname-label", HOSTNAME_LABEL, unset="", default_note="Hostname with legacy names, hostname with 4.9 names"
    ).setting("Name of the DCGM_FI_* label that carries the node's name. none: no such label.")
    dcgm_pod_uid: bool = Option("dcgm-pod-uid", types.SWITCH, "off").setting(
        "Add pod_uid to the DCGM_FI_* series of pods, where it is known."
    )
    dcgm_old_labels: bool = Option("dcgm-old-labels", types.SWITCH, "off").setting(
        "Use the old label names on DCGM_FI_* series: uuid, container_name, pod_name, pod_namespace."
    )
    dcgm_model_hyphens: bool = Option("dcgm-model-hyphens", types.SWITCH, "off").setting(
        "Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3."
    )
    xid_count_window_seconds: float = Option("xid-count-window", types.duration(1, 3600), "5m").setting(
        "Window of DCGM_EXP_XID_ERRORS_COUNT, if the collectors file has it."
    )
    clock_events_window_seconds: float = Option("clock-events-window", types.duration(1, 3600), "5m").setting(
        "Window of DCGM_EXP_CLOCK_EVENTS_COUNT, if the collectors file has it."
    )
    series_limit: int = Option("series-limit", types.count(100, 10_000_000), "20000", unit="series").setting(
        "Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total."
    )
    linger_seconds: float = Option("linger", types.duration(60, 86_400), "5m").setting(
        "Time after a container's end for which its counters stay, for Prometheus to scrape their last values."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSettings:
    """Settings of prices, and of the facts that select them."""

    book: Path | None = Option("price-book", types.PATH, default_note="the bundled list prices").setting(
        "YAML file of prices (see: prices check); read again at SIGHUP. none: no prices, no money."
    )
    """Argument of ``price_book.load``: ``None`` for the bundled list prices, ``none`` for no prices."""
    instance_type: str = Option("instance-type", types.NAME, unset="", default_note="not known").setting(
        "Instance type of this node, such as p5.48xlarge, for rows of the price book."
    )
    capacity_type: Literal["on-demand", "spot", "reserved", ""] = Option(
        "capacity-type", types.choice("on-demand", "spot", "reserved"), unset="", default_note="not known"
    ).setting("Capacity type of this node, for rows of the price book.")
    region: str = Option("region", types.NAME, unset="", default_note="not known").setting(
        "Region of this node, such as us-east-1, for rows of the price book."
    )

    @property
    def node_facts(self) -> NodeFacts:
        """Return the facts of the node in the settings; facts from its labels are added later."""
        return NodeFacts(instance_type=self.instance_type, capacity_type=self.capacity_type, region=self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSettings:
    """Settings of the state across restarts, and of simulation."""

    state_dir: Path | None = Option("state-dir", types.PATH, default_note="nothing is kept").setting(
        "Existing directory for the state across restarts."
    )
    lock_dir: Path | None = Option("lock-dir", types.PATH, "/run/gpu-cost-exporter").setting(
        "Host directory with the lock of the ledger, which one agent per node writes; created if missing. A "
        "simulated node uses it only if it is set."
    )
    """Directory of the lock; ``None`` for a simulated node without a given directory."""
    state_interval_seconds: float = Option("state-interval", types.duration(1, 300), "5s").setting(
        "Time between two saves of the ledger; counters show what has been saved."
    )
    simulate: str | None = Option("simulate", types.NAME, default_note="the real node").setting(
        "Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real."
    )
    simulate_hour_seconds: float = Option("simulate-hour", types.duration(1, 3600), "1h").setting(
        "Length of an hour in the activity windows of a simulated node; shorter for demonstrations."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settled configuration of the agent with valid values, as returned by ``load_agent``."""

    serving: AgentServingSettings = group("Serving", AgentServingSettings)
    sampling: SamplingSettings = group("Sampling", SamplingSettings)
    attribution: AttributionSettings = group("Attribution", AttributionSettings)
    owners: OwnerSettings = group("Owners", OwnerSettings)
    exposition: ExpositionSettings = group("What is exported", ExpositionSettings)
    prices: PriceSettings = group("Cost", PriceSettings)
    running: RunningSettings = group("Running", RunningSettings)
    logging: LoggingSettings = group("Running", LoggingSettings)
    warnings: tuple[str, ...] = ()
    """Warnings for the log at the start, one line each: accepted settings that may not have the intended effect."""


OPTIONS = options_of(AgentConfig)
BY_KEY = {option.key: option for option in OPTIONS}


_DAYS = re.compile(r"\s*([0-9]{1,4})d\s*")
_MOST_DAYS = 3650


def _parse_days(text: str) -> int:
    found = _DAYS.fullmatch(text)
    return int(found[1]) if found else -1


CURRENCY = OptionType(
    types.checked(str.strip, CURRENCIES.__contains__), "a currency", "an ISO 4217 code such as USD or EUR", "CODE"
)
DAYS = OptionType(
    types.checked(_parse_days, range(_MOST_DAYS + 1).__contains__), "a number of days", "0d to 3650d", "DAYS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceServingSettings:
    """Settings of the cost service's web server."""

    listen: Listen = Option("listen", types.LISTEN, ":9401").setting(
        "Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets."
    )
    web_config: Path | None = _WEB_CONFIG.setting(_WEB_CONFIG_HELP)
    external_url: str = Option("external-url", URL, unset="", default_note="links are relative to the host").setting(
        "Public address of the service, for links; its path is the prefix behind a proxy, such as /cost."
    )
    title: str = Option("title", types.NAME, "GPU cost").setting("Head of every page.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of the data that the cost service reads and stores."""

    store: Path | None = Option("store", types.PATH, default_note="only what Prometheus still has").setting(
        "SQLite file of closed days; created if missing. One service writes to it."
    )
    budgets: Path | None = Option("budgets", types.PATH, default_note="no budgets").setting(
        "YAML file of budgets; read again at SIGHUP."
    )
    currency: str = Option(
        "currency", CURRENCY, unset="", default_note="the only currency; with several each request must name one"
    ).setting("Currency of OpenCost's API if the request has none; clients of OpenCost never send one.")
    timezone: tzinfo = Option("timezone", types.ZONE, "UTC").setting(
        "Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours."
    )
    refresh_interval_seconds: float = Option("refresh-interval", types.duration(10, 86_400), "5m").setting(
        "Time between two checks for newer hours, budgets and days to close."
    )
    history_days: int = Option("history", DAYS, "90d").setting(
        "Number of past days with which the store is filled from Prometheus."
    )
