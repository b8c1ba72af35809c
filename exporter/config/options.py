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
        "YAML file of TLS and passwords, as Prometheus' own (docs/security.md); read again when it changes."
    )
}

_SERVING = group(
    "Serving",
    {
        Option("listen", types.LISTEN, ":9400"): (
            "Address of the page, the metrics and the API; no host means every interface, IPv6 in brackets."
        ),
        **_WEB_CONFIG,
        Option("release-seconds", types.duration(1, 3600), "60s"): (
            "How long SIGUSR1 or POST /-/release closes the driver, so that a GPU reset or driver upgrade can pass."
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
            "Where readings come from: NVML and, where dcgm-address is given, DCGM beside it (auto); or one alone."
        ),
        Option("dcgm-address", ENGINE_ADDRESS, default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm"): (
            "Where nv-hostengine listens, port 5555 unless given; embedded: an engine of the agent's own."
        ),
        Option("idle-threshold", types.RATIO, "0.05", unit="ratio of the device"): (
            "A holder is idle while its activity is below this."
        ),
    },
)
_ATTRIBUTION = group(
    "Attribution",
    {
        Option("attribution", types.SWITCH, "on"): "Ask the kubelet which pod holds which device.",
        Option("kubelet-socket", types.SOCKET, "/var/lib/kubelet/pod-resources/kubelet.sock"): (
            "The kubelet's pod-resources socket. In a container mount its directory, never the socket itself."
        ),
        Option("kubelet-interval", types.duration(1, 300), "5s"): "Time between two questions to the kubelet.",
        Option("attribution-expiry", types.duration(5, 3600), "60s"): (
            "How long the kubelet's last answer holds while it cannot be asked; after that allocation is unknown."
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
            "Where the host's /proc is: tells which pod a process belongs to. Needs the host's PID namespace."
        ),
        Option("pod-log-root", types.PATH, "/var/log/pods"): (
            "Where the kubelet keeps pod logs; only the directories' names are read, to name a pod by its uid."
        ),
        Option("workload-manager", types.choice("kubernetes", "slurm", "host"), "kubernetes"): (
            "Who gives out this node's GPUs: pods by the kubelet, Slurm's jobs, or nobody: users and systemd units."
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
            "Ask the Kubernetes API for the metadata of this node's pods: workloads, teams, queues, DRA, fractions."
        ),
        Option(
            "kubeconfig", types.PATH, default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config"
        ): "How to reach the Kubernetes API.",
        Option("kube-start-jitter", types.duration(0, 600), "60s"): (
            "The first question to the API comes at a random time within this, so that a fleet does not ask at once."
        ),
        Option("team-keys", types.KEYS, "team,owner,project,cost-center,costcenter,cost_center,department"): (
            "Labels or annotations that name the team; the first found on the pod, then on its namespace."
        ),
        Option("cost-labels", types.LABEL_KEYS, default_note="none"): (
            "Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8."
        ),
        Option("namespace-teams", types.SWITCH, "on"): (
            "Look for a team and cost labels on the namespace too; needs the right to get namespaces."
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
            "Name labels of the DCGM_FI_* series uuid, container_name, pod_name, pod_namespace, as of old."
        ),
        Option("dcgm-model-hyphens", types.SWITCH, "off"): (
            "Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3."
        ),
        Option("xid-count-window", types.duration(1, 3600), "5m"): (
            "Span that DCGM_EXP_XID_ERRORS_COUNT counts in, where the collectors file asks for it."
        ),
        Option("clock-events-window", types.duration(1, 3600), "5m"): (
            "Span that DCGM_EXP_CLOCK_EVENTS_COUNT counts in, where the collectors file asks for it."
        ),
        Option("series-limit", types.count(100, 10_000_000), "20000", unit="series"): (
            "Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total."
        ),
        Option("linger", types.duration(60, 86_400), "5m"): (
            "How long a container's counters are shown after its end, so that Prometheus sees their last values."
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
            "Instance type of this node, such as p5.48xlarge, for the rows of the price book that ask for one."
        ),
        Option("capacity-type", types.choice("on-demand", "spot", "reserved"), default_note="not known"): (
            "How this node is paid for, for the rows of the price book that ask for it."
        ),
        Option("region", types.NAME, default_note="not known"): (
            "Region of this node, such as us-east-1, for the rows of the price book that ask for one."
        ),
    },
)
_RUNNING = group(
    "Running",
    {
        Option("state-dir", types.PATH, default_note="nothing is kept"): (
            "Existing directory for what is kept across restarts."
        ),
        Option("lock-dir", types.PATH, "/run/gpu-cost-exporter"): (
            "Directory of the host with the lock by which one agent per node writes the ledger; made where it is "
            "missing. A simulated node uses it only where it is given."
        ),
        Option("state-interval", types.duration(1, 300), "5s"): (
            "Time between two saves of the ledger; counters show what has been saved."
        ),
        Option("simulate", types.NAME, default_note="the real node"): (
            "Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real."
        ),
        Option("simulate-hour", types.duration(1, 3600), "1h"): (
            "How long an hour of the activity windows of a simulated node lasts: demonstrations need not."
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
            "Where people reach the service, for links; its path is the prefix behind a proxy, as /cost."
        ),
        Option("title", types.NAME, "GPU cost"): "Head of every page.",
    },
)
_BOOKS = group(
    "Reading and keeping",
    {
        Option("store", types.PATH, default_note="only what Prometheus still has"): (
            "File that keeps closed days (SQLite); made where there is none. One service writes to it."
        ),
        Option("budgets", types.PATH, default_note="no budgets"): "YAML file of budgets; read again at SIGHUP.",
        Option("currency", CURRENCY, default_note="the only currency; with several each request must name one"): (
            "Currency of OpenCost's API where a request names none, since clients of OpenCost never do."
        ),
        Option("timezone", types.ZONE, "UTC"): (
            "Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours."
        ),
        Option("refresh-interval", types.duration(10, 86_400), "5m"): (
            "Time between two looks for newer hours, budgets and days to close."
        ),
        Option("history", DAYS, "90d"): (
            "How many days back the store is filled from Prometheus, as far as that has them."
        ),
    },
)
_RUNNING_OF_SERVICE = group(
    "Running",
    {
        **_LOGGING,
    },
)
SERVE_OPTIONS: tuple[Option, ...] = (*_SERVING_OF_SERVICE, *_BOOKS, *_RUNNING_OF_SERVICE)
