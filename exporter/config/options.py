"""Every option of the agent and the cost service, one value each; flags, help and docs are made from this table."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from exporter.config import types
from exporter.config.dcgm_flags import HOSTNAME_LABEL
from exporter.config.types import CURRENCIES, DEFAULT_ADDRESS, ENGINE_ADDRESS, OptionType

ENV_PREFIX = "GPU_COST_EXPORTER_"

SERVE, SAMPLE, ATTRIBUTE, SHOW = "Serving", "Sampling", "Attribution", "What is exported"
OWN, COST, RUN = "Owners", "Cost", "Running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. ``key`` is its name in the file; the flag and the variable follow from it.

    ``default`` is what a user would have to write; ``None`` where the option is unset by default.
    """

    key: str
    kind: OptionType
    default: str | None
    help: str
    group: str
    unit: str = ""
    default_note: str = ""

    @property
    def flag(self) -> str:
        """``--sample-interval``."""
        return f"--{self.key}"

    @property
    def env(self) -> str:
        """``GPU_COST_EXPORTER_SAMPLE_INTERVAL``."""
        return ENV_PREFIX + self.key.upper().replace("-", "_")


LOG_FORMAT = Option(
    key="log-format",
    kind=types.choice("text", "json"),
    default="text",
    group=RUN,
    help="Form of the log on standard error; one line per event either way.",
)
LOG_LEVEL = Option(
    key="log-level",
    kind=types.choice("debug", "info", "warning", "error"),
    default="info",
    group=RUN,
    help="Least severe event that is logged.",
)
WEB_CONFIG = Option(
    key="web-config",
    kind=types.PATH,
    default=None,
    default_note="plain HTTP, no passwords",
    group=SERVE,
    help="YAML file of TLS and passwords, in Prometheus' format (docs/security.md); reloaded when it changes.",
)

OPTIONS: tuple[Option, ...] = (
    Option(
        key="listen",
        kind=types.LISTEN,
        default=":9400",
        group=SERVE,
        help="Address of the page, the metrics and the API; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        key="release-seconds",
        kind=types.duration(1, 3600),
        default="60s",
        group=SERVE,
        help="Time for which SIGUSR1 or POST /-/release closes the driver, for a GPU reset or driver upgrade.",
    ),
    Option(
        key="sample-interval",
        kind=types.duration(0.2, 300),
        default="1s",
        group=SAMPLE,
        help="Time between two readings of the driver. Prometheus' scrape interval is independent of it.",
    ),
    Option(
        key="source",
        kind=types.choice("auto", "nvml", "dcgm"),
        default="auto",
        group=SAMPLE,
        help="Source of readings: NVML, and DCGM if dcgm-address is set (auto); or one alone.",
    ),
    Option(
        key="dcgm-address",
        kind=ENGINE_ADDRESS,
        default=None,
        default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm",
        group=SAMPLE,
        help="Address of nv-hostengine, by default port 5555; embedded: an engine in the agent's child process.",
    ),
    Option(
        key="idle-threshold",
        kind=types.RATIO,
        default="0.05",
        unit="ratio of the device",
        group=SAMPLE,
        help="A holder is idle while its activity is below this.",
    ),
    Option(
        key="attribution",
        kind=types.SWITCH,
        default="on",
        group=ATTRIBUTE,
        help="Read the holders of devices from the kubelet.",
    ),
    Option(
        key="kubelet-socket",
        kind=types.SOCKET,
        default="/var/lib/kubelet/pod-resources/kubelet.sock",
        group=ATTRIBUTE,
        help="The kubelet's pod-resources socket. In a container mount its directory, never the socket itself.",
    ),
    Option(
        key="kubelet-interval",
        kind=types.duration(1, 300),
        default="5s",
        group=ATTRIBUTE,
        help="Time between two requests to the kubelet.",
    ),
    Option(
        key="attribution-expiry",
        kind=types.duration(5, 3600),
        default="60s",
        group=ATTRIBUTE,
        help="How long the kubelet's last answer is valid while it does not answer; then allocation is unknown.",
    ),
    Option(
        key="gpu-resources",
        kind=types.RESOURCES,
        default="nvidia.com/gpu,nvidia.com/gpu.shared,nvidia.com/mig-*,volcano.sh/vgpu-number",
        group=ATTRIBUTE,
        help="Extended resources that are GPUs, as names or patterns. NVIDIA_RESOURCE_NAMES adds to them.",
    ),
    Option(
        key="node-name",
        kind=types.NAME,
        default=None,
        default_note="$NODE_NAME, else the host name",
        group=ATTRIBUTE,
        help="Name of this node in labels and on the page.",
    ),
    Option(
        key="proc-root",
        kind=types.PATH,
        default="/proc",
        group=ATTRIBUTE,
        help="Path of the host's /proc, which maps processes to pods. Needs the host's PID namespace.",
    ),
    Option(
        key="pod-log-root",
        kind=types.PATH,
        default="/var/log/pods",
        group=ATTRIBUTE,
        help="Folder of the kubelet's pod logs; the agent reads only the directories' names, to find the pod of a uid.",
    ),
    Option(
        key="workload-manager",
        kind=types.choice("kubernetes", "slurm", "host"),
        default="kubernetes",
        group=ATTRIBUTE,
        help="Workload manager of this node: kubernetes (pods), slurm (jobs), or host (users and systemd units).",
    ),
    Option(
        key="job-mapping-dir",
        kind=types.PATH,
        default=None,
        default_note="jobs by their processes' cgroups alone",
        group=ATTRIBUTE,
        help="Slurm: directory of files named by GPU (0, or 2.1 for an instance) with one job id per line.",
    ),
    Option(
        key="kube-metadata",
        kind=types.SWITCH,
        default="off",
        group=OWN,
        default_note="off; on for a simulated node",
        help="Read the metadata of this node's pods from the Kubernetes API: workloads, teams, queues, DRA, fractions.",
    ),
    Option(
        key="kubeconfig",
        kind=types.PATH,
        default=None,
        default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config",
        group=OWN,
        help="Kubeconfig of the Kubernetes API.",
    ),
    Option(
        key="kube-start-jitter",
        kind=types.duration(0, 600),
        default="60s",
        group=OWN,
        help="The first request to the API comes at a random time within this, to spread the load of a fleet.",
    ),
    Option(
        key="team-keys",
        kind=types.KEYS,
        default="team,owner,project,cost-center,costcenter,cost_center,department",
        group=OWN,
        help="Labels or annotations that name the team; the first found on the pod, then on its namespace.",
    ),
    Option(
        key="cost-labels",
        kind=types.LABEL_KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8.",
    ),
    Option(
        key="namespace-teams",
        kind=types.SWITCH,
        default="on",
        group=OWN,
        help="Also read team and cost labels of the namespace; needs the right to get namespaces.",
    ),
    Option(
        key="pod-labels",
        kind=types.KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Pod labels shown on gpu_pod_info as label_<name>; at most 10.",
    ),
    Option(
        key="pod-annotations",
        kind=types.KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Pod annotations shown on gpu_pod_info as annotation_<name>, cut to 128 characters; at most 10.",
    ),
    Option(
        key="reservation-namespaces",
        kind=types.KEYS,
        default="kai-resource-reservation,runai-reservation",
        group=OWN,
        help="Namespaces of the pods that hold GPUs for fractions of KAI or Run:ai.",
    ),
    Option(
        key="collectors",
        kind=types.PATH,
        default=None,
        default_note="dcgm-exporter's default set",
        group=SHOW,
        help="CSV file in dcgm-exporter's format that says which DCGM_FI_* metrics are exported; old and new names. Or"
        " wide: a preset with what dashboards of GKE, OKE and OpenShift read.",
    ),
    Option(
        key="dcgm-names",
        kind=types.choice("legacy", "4.9"),
        default="legacy",
        group=SHOW,
        help="Spelling of the default set: names up to dcgm-exporter 4.8, or those from 4.9 on.",
    ),
    Option(
        key="hostname-label",
        kind=HOSTNAME_LABEL,
        default=None,
        default_note="Hostname with legacy names, hostname with 4.9 names",
        group=SHOW,
        help="Name of the DCGM_FI_* label that carries the node's name. none: no such label.",
    ),
    Option(
        key="dcgm-pod-uid",
        kind=types.SWITCH,
        default="off",
        group=SHOW,
        help="Add pod_uid to the DCGM_FI_* series of pods, where it is known.",
    ),
    Option(
        key="dcgm-old-labels",
        kind=types.SWITCH,
        default="off",
        group=SHOW,
        help="Use the old label names on DCGM_FI_* series: uuid, container_name, pod_name, pod_namespace.",
    ),
    Option(
        key="dcgm-model-hyphens",
        kind=types.SWITCH,
        default="off",
        group=SHOW,
        help="Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3.",
    ),
    Option(
        key="xid-count-window",
        kind=types.duration(1, 3600),
        default="5m",
        group=SHOW,
        help="Window of DCGM_EXP_XID_ERRORS_COUNT, if the collectors file has it.",
    ),
    Option(
        key="clock-events-window",
        kind=types.duration(1, 3600),
        default="5m",
        group=SHOW,
        help="Window of DCGM_EXP_CLOCK_EVENTS_COUNT, if the collectors file has it.",
    ),
    Option(
        key="series-limit",
        kind=types.count(100, 10_000_000),
        default="20000",
        unit="series",
        group=SHOW,
        help="Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total.",
    ),
    Option(
        key="linger",
        kind=types.duration(60, 86_400),
        default="5m",
        group=SHOW,
        help="Time after a container's end for which its counters stay, for Prometheus to scrape their last values.",
    ),
    Option(
        key="price-book",
        kind=types.PATH,
        default=None,
        default_note="the bundled list prices",
        group=COST,
        help="YAML file of prices (see: prices check); read again at SIGHUP. none: no prices, no money.",
    ),
    Option(
        key="instance-type",
        kind=types.NAME,
        default=None,
        default_note="not known",
        group=COST,
        help="Instance type of this node, such as p5.48xlarge, for rows of the price book.",
    ),
    Option(
        key="capacity-type",
        kind=types.choice("on-demand", "spot", "reserved"),
        default=None,
        default_note="not known",
        group=COST,
        help="Capacity type of this node, for rows of the price book.",
    ),
    Option(
        key="region",
        kind=types.NAME,
        default=None,
        default_note="not known",
        group=COST,
        help="Region of this node, such as us-east-1, for rows of the price book.",
    ),
    Option(
        key="state-dir",
        kind=types.PATH,
        default=None,
        default_note="nothing is kept",
        group=RUN,
        help="Existing directory for the state across restarts.",
    ),
    Option(
        key="lock-dir",
        kind=types.PATH,
        default="/run/gpu-cost-exporter",
        group=RUN,
        help="Host directory with the lock of the ledger, which one agent per node writes; created if missing. "
        "A simulated node uses it only if it is set.",
    ),
    Option(
        key="state-interval",
        kind=types.duration(1, 300),
        default="5s",
        group=RUN,
        help="Time between two saves of the ledger; counters show what has been saved.",
    ),
    Option(
        key="simulate",
        kind=types.NAME,
        default=None,
        default_note="the real node",
        group=RUN,
        help="Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real.",
    ),
    Option(
        key="simulate-hour",
        kind=types.duration(1, 3600),
        default="1h",
        group=RUN,
        help="Length of an hour in the activity windows of a simulated node; shorter for demonstrations.",
    ),
    LOG_FORMAT,
    LOG_LEVEL,
)

BY_KEY = {option.key: option for option in OPTIONS}


BOOKS = "Reading and keeping"


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


def _parse_currency(text: str) -> str:
    if text.strip() not in CURRENCIES:
        raise ValueError(text)
    return text.strip()


_MOST_DAYS = 3650
URL = OptionType(
    parse=_parse_url,
    noun="an address",
    allowed="http:// or https:// with a host, a port and a path if need be, no password and no query",
    metavar="URL",
)
CURRENCY = OptionType(
    parse=_parse_currency, noun="a currency", allowed="an ISO 4217 code such as USD or EUR", metavar="CODE"
)
DAYS = OptionType(parse=_parse_days, noun="a number of days", allowed="0d to 3650d", metavar="DAYS")

SERVE_OPTIONS: tuple[Option, ...] = (
    Option(
        key="listen",
        kind=types.LISTEN,
        default=":9401",
        group=SERVE,
        help="Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        key="external-url",
        kind=URL,
        default=None,
        default_note="links are relative to the host",
        group=SERVE,
        help="Public address of the service, for links; its path is the prefix behind a proxy, such as /cost.",
    ),
    Option(
        key="title",
        kind=types.NAME,
        default="GPU cost",
        group=SERVE,
        help="Head of every page.",
    ),
    Option(
        key="store",
        kind=types.PATH,
        default=None,
        default_note="only what Prometheus still has",
        group=BOOKS,
        help="SQLite file of closed days; created if missing. One service writes to it.",
    ),
    Option(
        key="budgets",
        kind=types.PATH,
        default=None,
        default_note="no budgets",
        group=BOOKS,
        help="YAML file of budgets; read again at SIGHUP.",
    ),
    Option(
        key="currency",
        kind=CURRENCY,
        default=None,
        default_note="the only currency; with several each request must name one",
        group=BOOKS,
        help="Currency of OpenCost's API if the request has none; clients of OpenCost never send one.",
    ),
    Option(
        key="timezone",
        kind=types.ZONE,
        default="UTC",
        group=BOOKS,
        help="Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours.",
    ),
    Option(
        key="refresh-interval",
        kind=types.duration(10, 86_400),
        default="5m",
        group=BOOKS,
        help="Time between two checks for newer hours, budgets and days to close.",
    ),
    Option(
        key="history",
        kind=DAYS,
        default="90d",
        group=BOOKS,
        help="Number of past days with which the store is filled from Prometheus.",
    ),
    LOG_FORMAT,
    LOG_LEVEL,
)
