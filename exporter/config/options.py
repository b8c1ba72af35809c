"""Every option of the agent and the cost service, one value each; flags, help and docs are made from this table."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from urllib.parse import urlsplit

from exporter.config import types
from exporter.config.dcgm_flags import HOSTNAME_LABEL
from exporter.config.types import CURRENCIES, DEFAULT_ADDRESS, ENGINE_ADDRESS, OptionType

ENV_PREFIX = "GPU_COST_EXPORTER_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``key`` is its name in the file; the flag, the variable and the setting's field follow from it.

    ``default`` is what a user would have to write; ``None`` where the option is unset by default.
    """

    key: str
    kind: OptionType
    default: str | None = None
    _: KW_ONLY
    unit: str = ""
    default_note: str = ""
    help: str = ""
    group: str = ""
    """Heading under which help and docs list it."""

    @property
    def flag(self) -> str:
        """``--sample-interval``."""
        return f"--{self.key}"

    @property
    def env(self) -> str:
        """``GPU_COST_EXPORTER_SAMPLE_INTERVAL``."""
        return ENV_PREFIX + self.key.upper().replace("-", "_")

    @property
    def field(self) -> str:
        """``sample_interval_seconds``."""
        return self.key.replace("-", "_").removesuffix(self.kind.suffix) + self.kind.suffix

    def usage(self, also: Sequence[str] = ()) -> str:
        """Return the help of a command line; ``also`` are other names of the flag."""
        default = self.default_note or self.default or "none"
        unit = f" {self.unit}" if self.unit else ""
        allowed = "" if self.kind.metavar.startswith("{") else f" Allowed: {self.kind.allowed}."
        names = f" [also: {', '.join(also)}]" if also else ""
        return f"{self.help}{allowed} [default: {default}{unit}]{names}".replace("%", "%%")


def group(title: str, options: Mapping[Option, str]) -> tuple[Option, ...]:
    """Return the options of one heading, of which each has its help here."""
    return tuple(replace(option, group=title, help=text) for option, text in options.items())


_LOGGING = {
    Option("log-format", types.choice("text", "json"), "text"): (
        "Form of the log on standard error; one line per event either way."
    ),
    Option("log-level", types.choice("debug", "info", "warning", "error"), "info"): (
        "Least severe event that is logged."
    ),
}
_WEB_CONFIG = {
    Option("web-config", types.PATH, default_note="plain HTTP, no passwords"): (
        "YAML file of TLS and passwords, in Prometheus' format (docs/security.md); reloaded when it changes."
    )
}

_SERVING = group(
    "Serving",
    {
        Option("listen", types.LISTEN, ":9400"): (
            "Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets."
        ),
        **_WEB_CONFIG,
        Option("release-seconds", types.duration(1, 3600), "60s"): (
            "Time for which SIGUSR1 or POST /-/release closes the driver, for a GPU reset or driver upgrade."
        ),
    },
)
_SAMPLING = group(
    "Sampling",
    {
        Option("sample-interval", types.duration(0.2, 300), "1s"): (
            "Time between two readings of the driver. Prometheus' scrape interval is independent of it."
        ),
        Option("source", types.choice("auto", "nvml", "dcgm"), "auto"): (
            "Source of readings: NVML, and DCGM if dcgm-address is set (auto); or one alone."
        ),
        Option("dcgm-address", ENGINE_ADDRESS, default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm"): (
            "Address of nv-hostengine, by default port 5555; embedded: an engine in the agent's child process."
        ),
        Option("idle-threshold", types.RATIO, "0.05", unit="ratio of the device"): (
            "A holder is idle while its activity is below this."
        ),
    },
)
_ATTRIBUTION = group(
    "Attribution",
    {
        Option("attribution", types.SWITCH, "on"): "Read the holders of devices from the kubelet.",
        Option("kubelet-socket", types.SOCKET, "/var/lib/kubelet/pod-resources/kubelet.sock"): (
            "The kubelet's pod-resources socket. In a container mount its directory, never the socket itself."
        ),
        Option("kubelet-interval", types.duration(1, 300), "5s"): "Time between two requests to the kubelet.",
        Option("attribution-expiry", types.duration(5, 3600), "60s"): (
            "How long the kubelet's last answer is valid while it does not answer; then allocation is unknown."
        ),
        Option(
            "gpu-resources",
            types.RESOURCES,
            "nvidia.com/gpu,nvidia.com/gpu.shared,nvidia.com/mig-*,volcano.sh/vgpu-number",
        ): "Extended resources that are GPUs, as names or patterns. NVIDIA_RESOURCE_NAMES adds to them.",
        Option("node-name", types.NAME, default_note="$NODE_NAME, else the host name"): (
            "Name of this node in labels and on the page."
        ),
        Option("proc-root", types.PATH, "/proc"): (
            "Path of the host's /proc, which maps processes to pods. Needs the host's PID namespace."
        ),
        Option("pod-log-root", types.PATH, "/var/log/pods"): (
            "Folder of the kubelet's pod logs; the agent reads only the directories' names, to find the pod of a uid."
        ),
        Option("workload-manager", types.choice("kubernetes", "slurm", "host"), "kubernetes"): (
            "Workload manager of this node: kubernetes (pods), slurm (jobs), or host (users and systemd units)."
        ),
        Option("job-mapping-dir", types.PATH, default_note="jobs by their processes' cgroups alone"): (
            "Slurm: directory of files named by GPU (0, or 2.1 for an instance) with one job id per line."
        ),
    },
)
_OWNERS = group(
    "Owners",
    {
        Option("kube-metadata", types.SWITCH, "off", default_note="off; on for a simulated node"): (
            "Read the metadata of this node's pods from the Kubernetes API: workloads, teams, queues, DRA, fractions."
        ),
        Option(
            "kubeconfig", types.PATH, default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config"
        ): "Kubeconfig of the Kubernetes API.",
        Option("kube-start-jitter", types.duration(0, 600), "60s"): (
            "The first request to the API comes at a random time within this, to spread the load of a fleet."
        ),
        Option("team-keys", types.KEYS, "team,owner,project,cost-center,costcenter,cost_center,department"): (
            "Labels or annotations that name the team; the first found on the pod, then on its namespace."
        ),
        Option("cost-labels", types.LABEL_KEYS, default_note="none"): (
            "Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8."
        ),
        Option("namespace-teams", types.SWITCH, "on"): (
            "Also read team and cost labels of the namespace; needs the right to get namespaces."
        ),
        Option("pod-labels", types.KEYS, default_note="none"): (
            "Pod labels shown on gpu_pod_info as label_<name>; at most 10."
        ),
        Option("pod-annotations", types.KEYS, default_note="none"): (
            "Pod annotations shown on gpu_pod_info as annotation_<name>, cut to 128 characters; at most 10."
        ),
        Option("reservation-namespaces", types.KEYS, "kai-resource-reservation,runai-reservation"): (
            "Namespaces of the pods that hold GPUs for fractions of KAI or Run:ai."
        ),
    },
)
_EXPORTED = group(
    "What is exported",
    {
        Option("collectors", types.PATH, default_note="dcgm-exporter's default set"): (
            "CSV file in dcgm-exporter's format that says which DCGM_FI_* metrics are exported; old and new names. Or"
            " wide: a preset with what dashboards of GKE, OKE and OpenShift read."
        ),
        Option("dcgm-names", types.choice("legacy", "4.9"), "legacy"): (
            "Spelling of the default set: names up to dcgm-exporter 4.8, or those from 4.9 on."
        ),
        Option("hostname-label", HOSTNAME_LABEL, default_note="Hostname with legacy names, hostname with 4.9 names"): (
            "Name of the DCGM_FI_* label that carries the node's name. none: no such label."
        ),
        Option("dcgm-pod-uid", types.SWITCH, "off"): (
            "Add pod_uid to the DCGM_FI_* series of pods, where it is known."
        ),
        Option("dcgm-old-labels", types.SWITCH, "off"): (
            "Use the old label names on DCGM_FI_* series: uuid, container_name, pod_name, pod_namespace."
        ),
        Option("dcgm-model-hyphens", types.SWITCH, "off"): (
            "Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3."
        ),
        Option("xid-count-window", types.duration(1, 3600), "5m"): (
            "Window of DCGM_EXP_XID_ERRORS_COUNT, if the collectors file has it."
        ),
        Option("clock-events-window", types.duration(1, 3600), "5m"): (
            "Window of DCGM_EXP_CLOCK_EVENTS_COUNT, if the collectors file has it."
        ),
        Option("series-limit", types.count(100, 10_000_000), "20000", unit="series"): (
            "Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total."
        ),
        Option("linger", types.duration(60, 86_400), "5m"): (
            "Time after a container's end for which its counters stay, for Prometheus to scrape their last values."
        ),
    },
)
_COST = group(
    "Cost",
    {
        Option("price-book", types.PATH, default_note="the bundled list prices"): (
            "YAML file of prices (see: prices check); read again at SIGHUP. none: no prices, no money."
        ),
        Option("instance-type", types.NAME, default_note="not known"): (
            "Instance type of this node, such as p5.48xlarge, for rows of the price book."
        ),
        Option("capacity-type", types.choice("on-demand", "spot", "reserved"), default_note="not known"): (
            "Capacity type of this node, for rows of the price book."
        ),
        Option("region", types.NAME, default_note="not known"): (
            "Region of this node, such as us-east-1, for rows of the price book."
        ),
    },
)
_RUNNING = group(
    "Running",
    {
        Option("state-dir", types.PATH, default_note="nothing is kept"): (
            "Existing directory for the state across restarts."
        ),
        Option("lock-dir", types.PATH, "/run/gpu-cost-exporter"): (
            "Host directory with the lock of the ledger, which one agent per node writes; created if missing. A "
            "simulated node uses it only if it is set."
        ),
        Option("state-interval", types.duration(1, 300), "5s"): (
            "Time between two saves of the ledger; counters show what has been saved."
        ),
        Option("simulate", types.NAME, default_note="the real node"): (
            "Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real."
        ),
        Option("simulate-hour", types.duration(1, 3600), "1h"): (
            "Length of an hour in the activity windows of a simulated node; shorter for demonstrations."
        ),
        **_LOGGING,
    },
)
OPTIONS: tuple[Option, ...] = (*_SERVING, *_SAMPLING, *_ATTRIBUTION, *_OWNERS, *_EXPORTED, *_COST, *_RUNNING)

BY_KEY = {option.key: option for option in OPTIONS}


def _parse_url(text: str) -> str:
    url = urlsplit(text.strip())
    if url.scheme not in {"http", "https"} or not url.hostname or url.query or url.fragment or url.username:
        raise ValueError(text)
    _ = url.port  # ValueError where it is none
    if any(part in {".", ".."} for part in url.path.split("/")) or any(mark in url.path for mark in "{}%\\"):
        raise ValueError(text)
    return text.strip().rstrip("/")


def _parse_days(text: str) -> int:
    number = text.strip().removesuffix("d")
    if number == text.strip() or not (number.isascii() and number.isdecimal()) or not 0 <= int(number) <= _MOST_DAYS:
        raise ValueError(text)
    return int(number)


_MOST_DAYS = 3650
URL = OptionType(
    _parse_url,
    "an address",
    "http:// or https:// with a host, a port and a path if need be, no password and no query",
    "URL",
)
CURRENCY = OptionType(
    types.checked(str.strip, CURRENCIES.__contains__), "a currency", "an ISO 4217 code such as USD or EUR", "CODE"
)
DAYS = OptionType(_parse_days, "a number of days", "0d to 3650d", "DAYS")

_SERVING_OF_SERVICE = group(
    "Serving",
    {
        Option("listen", types.LISTEN, ":9401"): (
            "Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets."
        ),
        **_WEB_CONFIG,
        Option("external-url", URL, default_note="links are relative to the host"): (
            "Public address of the service, for links; its path is the prefix behind a proxy, such as /cost."
        ),
        Option("title", types.NAME, "GPU cost"): "Head of every page.",
    },
)
_BOOKS = group(
    "Reading and keeping",
    {
        Option("store", types.PATH, default_note="only what Prometheus still has"): (
            "SQLite file of closed days; created if missing. One service writes to it."
        ),
        Option("budgets", types.PATH, default_note="no budgets"): "YAML file of budgets; read again at SIGHUP.",
        Option("currency", CURRENCY, default_note="the only currency; with several each request must name one"): (
            "Currency of OpenCost's API if the request has none; clients of OpenCost never send one."
        ),
        Option("timezone", types.ZONE, "UTC"): (
            "Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours."
        ),
        Option("refresh-interval", types.duration(10, 86_400), "5m"): (
            "Time between two checks for newer hours, budgets and days to close."
        ),
        Option("history", DAYS, "90d"): ("Number of past days with which the store is filled from Prometheus."),
    },
)
_RUNNING_OF_SERVICE = group(
    "Running",
    {
        **_LOGGING,
    },
)
SERVE_OPTIONS: tuple[Option, ...] = (*_SERVING_OF_SERVICE, *_BOOKS, *_RUNNING_OF_SERVICE)
