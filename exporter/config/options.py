"""Every option of the agent, one value each: flags, environment, file, help and defaults are made from this table."""

from dataclasses import dataclass

from exporter.config import kinds
from exporter.config.engine_address import DEFAULT_ADDRESS, ENGINE_ADDRESS
from exporter.config.hostname_label import HOSTNAME_LABEL
from exporter.config.kinds import Kind

ENV_PREFIX = "GPU_COST_EXPORTER_"

SERVE, SAMPLE, ATTRIBUTE, SHOW = "Serving", "Sampling", "Attribution", "What is exported"
OWN, COST, RUN = "Owners", "Cost", "Running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. ``key`` is its name in the file; the flag and the variable follow from it.

    ``default`` is what a user would have to write; ``None`` where the option is unset by default.
    """

    key: str
    kind: Kind
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
    kind=kinds.choice("text", "json"),
    default="text",
    group=RUN,
    help="Form of the log on standard error; one line per event either way.",
)
LOG_LEVEL = Option(
    key="log-level",
    kind=kinds.choice("debug", "info", "warning", "error"),
    default="info",
    group=RUN,
    help="Least severe event that is logged.",
)
WEB_CONFIG = Option(
    key="web-config",
    kind=kinds.PATH,
    default=None,
    default_note="plain HTTP, no passwords",
    group=SERVE,
    help="YAML file of TLS and passwords, as Prometheus' own (docs/web-config.md); read again when it changes.",
)

OPTIONS: tuple[Option, ...] = (
    Option(
        key="listen",
        kind=kinds.LISTEN,
        default=":9400",
        group=SERVE,
        help="Address of the page, the metrics and the API; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        key="release-seconds",
        kind=kinds.duration(1, 3600),
        default="60s",
        group=SERVE,
        help="How long SIGUSR1 or POST /-/release closes the driver, so that a GPU reset or driver upgrade can pass.",
    ),
    Option(
        key="sample-interval",
        kind=kinds.duration(0.2, 300),
        default="1s",
        group=SAMPLE,
        help="Time between two readings of the driver. Prometheus' scrape interval is independent of it.",
    ),
    Option(
        key="source",
        kind=kinds.choice("auto", "nvml", "dcgm"),
        default="auto",
        group=SAMPLE,
        help="Where readings come from: NVML and, where dcgm-address is given, DCGM beside it (auto); or one alone.",
    ),
    Option(
        key="dcgm-address",
        kind=ENGINE_ADDRESS,
        default=None,
        default_note=f"no DCGM; {DEFAULT_ADDRESS} with source dcgm",
        group=SAMPLE,
        help="Where nv-hostengine listens, port 5555 unless given; embedded: an engine of the agent's own.",
    ),
    Option(
        key="idle-threshold",
        kind=kinds.RATIO,
        default="0.05",
        unit="ratio of the device",
        group=SAMPLE,
        help="A holder is idle while its activity is below this.",
    ),
    Option(
        key="attribution",
        kind=kinds.SWITCH,
        default="on",
        group=ATTRIBUTE,
        help="Ask the kubelet which pod holds which device.",
    ),
    Option(
        key="kubelet-socket",
        kind=kinds.SOCKET,
        default="/var/lib/kubelet/pod-resources/kubelet.sock",
        group=ATTRIBUTE,
        help="The kubelet's pod-resources socket. In a container mount its directory, never the socket itself.",
    ),
    Option(
        key="kubelet-interval",
        kind=kinds.duration(1, 300),
        default="5s",
        group=ATTRIBUTE,
        help="Time between two questions to the kubelet.",
    ),
    Option(
        key="attribution-expiry",
        kind=kinds.duration(5, 3600),
        default="60s",
        group=ATTRIBUTE,
        help="How long the kubelet's last answer holds while it cannot be asked; after that allocation is unknown.",
    ),
    Option(
        key="gpu-resources",
        kind=kinds.RESOURCES,
        default="nvidia.com/gpu,nvidia.com/gpu.shared,nvidia.com/mig-*,volcano.sh/vgpu-number",
        group=ATTRIBUTE,
        help="Extended resources that are GPUs, as names or patterns. NVIDIA_RESOURCE_NAMES adds to them.",
    ),
    Option(
        key="node-name",
        kind=kinds.NAME,
        default=None,
        default_note="$NODE_NAME, else the host name",
        group=ATTRIBUTE,
        help="Name of this node in labels and on the page.",
    ),
    Option(
        key="proc-root",
        kind=kinds.PATH,
        default="/proc",
        group=ATTRIBUTE,
        help="Where the host's /proc is: tells which pod a process belongs to. Needs the host's PID namespace.",
    ),
    Option(
        key="pod-log-root",
        kind=kinds.PATH,
        default="/var/log/pods",
        group=ATTRIBUTE,
        help="Where the kubelet keeps pod logs; only the directories' names are read, to name a pod by its uid.",
    ),
    Option(
        key="workload-manager",
        kind=kinds.choice("kubernetes", "slurm", "host"),
        default="kubernetes",
        group=ATTRIBUTE,
        help="Who gives out this node's GPUs: pods by the kubelet, Slurm's jobs, or nobody: users and systemd units.",
    ),
    Option(
        key="job-mapping-dir",
        kind=kinds.PATH,
        default=None,
        default_note="jobs by their processes' cgroups alone",
        group=ATTRIBUTE,
        help="Slurm: directory of files named by GPU (0, or 2.1 for an instance) with one job id per line.",
    ),
    Option(
        key="kube-metadata",
        kind=kinds.SWITCH,
        default="off",
        group=OWN,
        default_note="off; on for a simulated node",
        help="Ask the Kubernetes API for the metadata of this node's pods: workloads, teams, queues, DRA, fractions.",
    ),
    Option(
        key="kubeconfig",
        kind=kinds.PATH,
        default=None,
        default_note="the service account's in a pod, else $KUBECONFIG or ~/.kube/config",
        group=OWN,
        help="How to reach the Kubernetes API.",
    ),
    Option(
        key="kube-start-jitter",
        kind=kinds.duration(0, 600),
        default="60s",
        group=OWN,
        help="The first question to the API comes at a random time within this, so that a fleet does not ask at once.",
    ),
    Option(
        key="team-keys",
        kind=kinds.KEYS,
        default="team,owner,project,cost-center,costcenter,cost_center,department",
        group=OWN,
        help="Labels or annotations that name the team; the first found on the pod, then on its namespace.",
    ),
    Option(
        key="cost-labels",
        kind=kinds.LABEL_KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Labels of pods, else of their namespaces, by which the ledger divides time, money and energy; at most 8.",
    ),
    Option(
        key="namespace-teams",
        kind=kinds.SWITCH,
        default="on",
        group=OWN,
        help="Look for a team and cost labels on the namespace too; needs the right to get namespaces.",
    ),
    Option(
        key="pod-labels",
        kind=kinds.KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Pod labels shown on gpu_pod_info as label_<name>; at most 10.",
    ),
    Option(
        key="pod-annotations",
        kind=kinds.KEYS,
        default=None,
        default_note="none",
        group=OWN,
        help="Pod annotations shown on gpu_pod_info as annotation_<name>, cut to 128 characters; at most 10.",
    ),
    Option(
        key="reservation-namespaces",
        kind=kinds.KEYS,
        default="kai-resource-reservation,runai-reservation",
        group=OWN,
        help="Namespaces of the pods that hold GPUs for fractions of KAI or Run:ai.",
    ),
    Option(
        key="collectors",
        kind=kinds.PATH,
        default=None,
        default_note="dcgm-exporter's default set",
        group=SHOW,
        help="CSV file in dcgm-exporter's format that says which DCGM_FI_* metrics are exported; old and new names. Or"
        " wide: a preset with what dashboards of GKE, OKE and OpenShift read.",
    ),
    Option(
        key="dcgm-names",
        kind=kinds.choice("legacy", "4.9"),
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
        kind=kinds.SWITCH,
        default="off",
        group=SHOW,
        help="Add pod_uid to the DCGM_FI_* series of pods, where it is known.",
    ),
    Option(
        key="dcgm-old-labels",
        kind=kinds.SWITCH,
        default="off",
        group=SHOW,
        help="Name labels of the DCGM_FI_* series uuid, container_name, pod_name, pod_namespace, as of old.",
    ),
    Option(
        key="dcgm-model-hyphens",
        kind=kinds.SWITCH,
        default="off",
        group=SHOW,
        help="Write modelName of the DCGM_FI_* series with hyphens for blanks: NVIDIA-H100-80GB-HBM3.",
    ),
    Option(
        key="xid-count-window",
        kind=kinds.duration(1, 3600),
        default="5m",
        group=SHOW,
        help="Span that DCGM_EXP_XID_ERRORS_COUNT counts in, where the collectors file asks for it.",
    ),
    Option(
        key="clock-events-window",
        kind=kinds.duration(1, 3600),
        default="5m",
        group=SHOW,
        help="Span that DCGM_EXP_CLOCK_EVENTS_COUNT counts in, where the collectors file asks for it.",
    ),
    Option(
        key="series-limit",
        kind=kinds.count(100, 10_000_000),
        default="20000",
        unit="series",
        group=SHOW,
        help="Pod series beyond this many are dropped, and counted in gpu_exporter_dropped_series_total.",
    ),
    Option(
        key="linger",
        kind=kinds.duration(60, 86_400),
        default="5m",
        group=SHOW,
        help="How long a container's counters are shown after its end, so that Prometheus sees their last values.",
    ),
    Option(
        key="price-book",
        kind=kinds.PATH,
        default=None,
        default_note="the bundled list prices",
        group=COST,
        help="YAML file of prices (see: prices check); read again at SIGHUP. none: no prices, no money.",
    ),
    Option(
        key="instance-type",
        kind=kinds.NAME,
        default=None,
        default_note="not known",
        group=COST,
        help="Instance type of this node, such as p5.48xlarge, for the rows of the price book that ask for one.",
    ),
    Option(
        key="capacity-type",
        kind=kinds.choice("on-demand", "spot", "reserved"),
        default=None,
        default_note="not known",
        group=COST,
        help="How this node is paid for, for the rows of the price book that ask for it.",
    ),
    Option(
        key="region",
        kind=kinds.NAME,
        default=None,
        default_note="not known",
        group=COST,
        help="Region of this node, such as us-east-1, for the rows of the price book that ask for one.",
    ),
    Option(
        key="state-dir",
        kind=kinds.PATH,
        default=None,
        default_note="nothing is kept",
        group=RUN,
        help="Existing directory for what is kept across restarts.",
    ),
    Option(
        key="lock-dir",
        kind=kinds.PATH,
        default="/run/gpu-cost-exporter",
        group=RUN,
        help="Directory of the host with the lock by which one agent per node writes the ledger; made where it is "
        "missing. A simulated node uses it only where it is given.",
    ),
    Option(
        key="state-interval",
        kind=kinds.duration(1, 300),
        default="5s",
        group=RUN,
        help="Time between two saves of the ledger; counters show what has been saved.",
    ),
    Option(
        key="simulate",
        kind=kinds.NAME,
        default=None,
        default_note="the real node",
        group=RUN,
        help="Show a simulated node instead: a shipped scenario (see: simulate list) or a file. Touches nothing real.",
    ),
    Option(
        key="simulate-hour",
        kind=kinds.duration(1, 3600),
        default="1h",
        group=RUN,
        help="How long an hour of the activity windows of a simulated node lasts: demonstrations need not.",
    ),
    LOG_FORMAT,
    LOG_LEVEL,
)

BY_KEY = {option.key: option for option in OPTIONS}
