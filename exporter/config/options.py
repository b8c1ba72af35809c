"""Every option of the agent and the cost service, one value each; flags, help and docs are made from this table."""

from collections.abc import Sequence
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
    help: str
    unit: str = ""
    default_note: str = ""
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


def group(title: str, *options: Option) -> tuple[Option, ...]:
    """Return options under one heading."""
    return tuple(replace(option, group=title) for option in options)


LOG_FORMAT = Option(
    "log-format",
    types.choice("text", "json"),
    "text",
    help="Form of the log on standard error; one line per event either way.",
)
LOG_LEVEL = Option(
    "log-level", types.choice("debug", "info", "warning", "error"), "info", help="Least severe event that is logged."
)
WEB_CONFIG = Option(
    "web-config",
    types.PATH,
    default_note="plain HTTP, no passwords",
    help="YAML file of TLS and passwords, as Prometheus' own (docs/security.md); read again when it changes.",
)

_SERVING = group(
    "Serving",
    Option(
        "listen",
        types.LISTEN,
        ":9400",
        help="Address of the page, the metrics and the API; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        "release-seconds",
        types.duration(1, 3600),
        "60s",
        help="How long SIGUSR1 or POST /-/release closes the driver, so that a GPU reset or driver upgrade can pass.",
    ),
)
_SAMPLING = group(
    "Sampling",
    Option(
        "sample-interval",
        types.duration(0.2, 300),
        "1s",
        help="Time between two readings of the driver. Prometheus' scrape interval is independent of it.",
    ),
    Option(
        "source",
        types.choice("auto", "nvml", "dcgm"),
        "auto",
        help="Where readings come from: NVML and, where dcgm-address is given, DCGM beside it (auto); or one alone.",
    ),
    Option(
        "dcgm-address",
        ENGINE_ADDRESS,
        default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm",
        help="Where nv-hostengine listens, port 5555 unless given; embedded: an engine of the agent's own.",
    ),
    Option(
        "idle-threshold",
        types.RATIO,
        "0.05",
        unit="ratio of the device",
        help="A holder is idle while its activity is below this.",
    ),
)
_ATTRIBUTION = group(
    "Attribution",
    Option("attribution", types.SWITCH, "on", help="Ask the kubelet which pod holds which device."),
    Option(
        "kubelet-socket",
        types.SOCKET,
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        help="The kubelet's pod-resources socket. In a container mount its directory, never the socket itself.",
    ),
    Option("kubelet-interval", types.duration(1, 300), "5s", help="Time between two questions to the kubelet."),
    Option(
        "attribution-expiry",
        types.duration(5, 3600),
        "60s",
        help="How long the kubelet's last answer holds while it cannot be asked; after that allocation is unknown.",
    ),
    Option(
        "gpu-resources",
        types.RESOURCES,
        "nvidia.com/gpu,nvidia.com/gpu.shared,nvidia.com/mig-*,volcano.sh/vgpu-number",
        help="Extended resources that are GPUs, as names or patterns. NVIDIA_RESOURCE_NAMES adds to them.",
    ),
    Option(
        "node-name",
        types.NAME,
        default_note="$NODE_NAME, else the host name",
        help="Name of this node in labels and on the page.",
    ),
    Option(
        "proc-root",
        types.PATH,
        "/proc",
        help="Where the host's /proc is: tells which pod a process belongs to. Needs the host's PID namespace.",
    ),
    Option(
        "pod-log-root",
        types.PATH,
        "/var/log/pods",
        help="Where the kubelet keeps pod logs; only the directories' names are read, to name a pod by its uid.",
    ),
    Option(
        "workload-manager",
        types.choice("kubernetes", "slurm", "host"),
        "kubernetes",
        help="Who gives out this node's GPUs: pods by the kubelet, Slurm's jobs, or nobody: users and systemd units.",
    ),
    Option(
        "job-mapping-dir",
        types.PATH,
        default_note="jobs by their processes' cgroups alone",
        help="Slurm: directory of files named by GPU (0, or 2.1 for an instance) with one job id per line.",
    ),
)
_OWNERS = group(
    "Owners",
    Option(
        "kube-metadata",
        types.SWITCH,
        "off",
        default_note="off; on for a simulated node",
        help="Ask the Kubernetes API for the metadata of this node's pods: workloads, teams, queues, DRA, fractions.",
    ),
    Option(
        "kubeconfig",
        types.PATH,
        default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config",
        help="How to reach the Kubernetes API.",
    ),
    Option(
        "kube-start-jitter",
        types.duration(0, 600),
        "60s",
        help="The first question to the API comes at a random time within this, so that a fleet does not ask at once.",
    ),
    Option(
        "team-keys",
        types.KEYS,
        "team,owner,project,cost-center,costcenter,cost_center,department",
        help="Labels or annotations that name the team; the first found on the pod, then on its namespace.",
    ),
    Option(
        "cost-labels",
        types.LABEL_KEYS,
        default_note="none",
        help="Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8.",
    ),
    Option(
        "namespace-teams",
        types.SWITCH,
        "on",
        help="Look for a team and cost labels on the namespace too; needs the right to get namespaces.",
    ),
    Option(
        "pod-labels",
        types.KEYS,
        default_note="none",
        help="Pod labels shown on gpu_pod_info as label_<name>; at most 10.",
    ),
    Option(
        "pod-annotations",
        types.KEYS,
        default_note="none",
        help="Pod annotations shown on gpu_pod_info as annotation_<name>, cut to 128 characters; at most 10.",
    ),
    Option(
        "reservation-namespaces",
        types.KEYS,
        "kai-resource-reservation,runai-reservation",
        help="Namespaces of the pods that hold GPUs for fractions of KAI or Run:ai.",
    ),
)
_EXPORTED = group(
    "What is exported",
    Option(
        "collectors",
        types.PATH,
        default_note="dcgm-exporter's default set",
        help="CSV file in dcgm-exporter's format that says which DCGM_FI_* metrics are exported; old and new names. Or"
        " wide: a preset with what dashboards of GKE, OKE and OpenShift read.",
    ),
    Option(
        "dcgm-names",
        types.choice("legacy", "4.9"),
        "legacy",
        help="Spelling of the default set: names up to dcgm-exporter 4.8, or those from 4.9 on.",
    ),
    Option(
        "hostname-label",
        HOSTNAME_LABEL,
        default_note="Hostname with legacy names, hostname with 4.9 names",
        help="Name of the DCGM_FI_* label that carries the node's name. none: no such label.",
    ),
    Option("dcgm-pod-uid", types.SWITCH, "off", help="Add pod_uid to the DCGM_FI_* series of pods, where it is known."),
    Option(
        "dcgm-old-labels",
        types.SWITCH,
        "off",
        help="Name labels of the DCGM_FI_* series uuid, container_name, pod_name, pod_namespace, as of old.",
    ),
    Option(
        "dcgm-model-hyphens",
        types.SWITCH,
        "off",
        help="Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3.",
    ),
    Option(
        "xid-count-window",
        types.duration(1, 3600),
        "5m",
        help="Span that DCGM_EXP_XID_ERRORS_COUNT counts in, where the collectors file asks for it.",
    ),
    Option(
        "clock-events-window",
        types.duration(1, 3600),
        "5m",
        help="Span that DCGM_EXP_CLOCK_EVENTS_COUNT counts in, where the collectors file asks for it.",
    ),
    Option(
        "series-limit",
        types.count(100, 10_000_000),
        "20000",
        unit="series",
        help="Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total.",
    ),
    Option(
        "linger",
        types.duration(60, 86_400),
        "5m",
        help="How long a container's counters are shown after its end, so that Prometheus sees their last values.",
    ),
)
_COST = group(
    "Cost",
    Option(
        "price-book",
        types.PATH,
        default_note="the bundled list prices",
        help="YAML file of prices (see: prices check); read again at SIGHUP. none: no prices, no money.",
    ),
    Option(
        "instance-type",
        types.NAME,
        default_note="not known",
        help="Instance type of this node, such as p5.48xlarge, for the rows of the price book that ask for one.",
    ),
    Option(
        "capacity-type",
        types.choice("on-demand", "spot", "reserved"),
        default_note="not known",
        help="How this node is paid for, for the rows of the price book that ask for it.",
    ),
    Option(
        "region",
        types.NAME,
        default_note="not known",
        help="Region of this node, such as us-east-1, for the rows of the price book that ask for one.",
    ),
)
_RUNNING = group(
    "Running",
    Option(
        "state-dir",
        types.PATH,
        default_note="nothing is kept",
        help="Existing directory for what is kept across restarts.",
    ),
    Option(
        "lock-dir",
        types.PATH,
        "/run/gpu-cost-exporter",
        help="Directory of the host with the lock by which one agent per node writes the ledger; made where it is "
        "missing. A simulated node uses it only where it is given.",
    ),
    Option(
        "state-interval",
        types.duration(1, 300),
        "5s",
        help="Time between two saves of the ledger; counters show what has been saved.",
    ),
    Option(
        "simulate",
        types.NAME,
        default_note="the real node",
        help="Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real.",
    ),
    Option(
        "simulate-hour",
        types.duration(1, 3600),
        "1h",
        help="How long an hour of the activity windows of a simulated node lasts: demonstrations need not.",
    ),
    LOG_FORMAT,
    LOG_LEVEL,
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
    parse=_parse_url,
    noun="an address",
    allowed="http:// or https:// with a host, a port and a path if need be, no password and no query",
    metavar="URL",
)
CURRENCY = OptionType(
    parse=types.checked(str.strip, CURRENCIES.__contains__),
    noun="a currency",
    allowed="an ISO 4217 code such as USD or EUR",
    metavar="CODE",
)
DAYS = OptionType(parse=_parse_days, noun="a number of days", allowed="0d to 3650d", metavar="DAYS")

_SERVING_OF_SERVICE = group(
    "Serving",
    Option(
        "listen",
        types.LISTEN,
        ":9401",
        help="Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        "external-url",
        URL,
        default_note="links are relative to the host",
        help="Where people reach the service, for links; its path is the prefix behind a proxy, as /cost.",
    ),
    Option("title", types.NAME, "GPU cost", help="Head of every page."),
)
_BOOKS = group(
    "Reading and keeping",
    Option(
        "store",
        types.PATH,
        default_note="only what Prometheus still has",
        help="File that keeps closed days (SQLite); made where there is none. One service writes to it.",
    ),
    Option("budgets", types.PATH, default_note="no budgets", help="YAML file of budgets; read again at SIGHUP."),
    Option(
        "currency",
        CURRENCY,
        default_note="the only currency; with several each request must name one",
        help="Currency of OpenCost's API where a request names none, since clients of OpenCost never do.",
    ),
    Option(
        "timezone",
        types.ZONE,
        "UTC",
        help="Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours.",
    ),
    Option(
        "refresh-interval",
        types.duration(10, 86_400),
        "5m",
        help="Time between two looks for newer hours, budgets and days to close.",
    ),
    Option(
        "history", DAYS, "90d", help="How many days back the store is filled from Prometheus, as far as that has them."
    ),
)
_RUNNING_OF_SERVICE = group(
    "Running",
    LOG_FORMAT,
    LOG_LEVEL,
)
SERVE_OPTIONS: tuple[Option, ...] = (*_SERVING_OF_SERVICE, *_BOOKS, *_RUNNING_OF_SERVICE)
