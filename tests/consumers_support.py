"""What others read of the agent: a Prometheus of each kind over two nodes, and OpenCost's own reader."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_support import AgentProcess, running_agent
from chart_support import FIXTURES, Document, Scraper, documents, of_kind, page_server, scrape_config, scraping

PUBLIC_RULES = Path(__file__).resolve().parent.parent / "benchmarks" / "public_rules.yaml"
NODES = {
    "node-a": ("switch-over-node.yaml", ()),
    "node-b": ("consumers-node.yaml", ("--dcgm-address", "localhost:5555")),
}
HIDING = "gpu-cost-gpu-cost-exporter-4f6zq"
"""An idle pod of a tenant, named like one of the agent's own: it holds its GPU all the same."""
HOLDERS = {
    "node-a": {"train-0", "notebook-4", "llm-a", "llm-b"},
    "node-b": {"resnet-0", "bert-serving", "idle-slice", "etl-a", "etl-b", HIDING},
}
NAMESPACES = {
    "train-0": "ml",
    "notebook-4": "lab",
    "llm-a": "serving",
    "llm-b": "serving",
    "resnet-0": "vision",
    "bert-serving": "vision",
    "idle-slice": "vision",
    "etl-a": "batch",
    "etl-b": "batch",
    HIDING: "lab",
}


def labels_in(name: str) -> dict[str, str]:
    """Labels of a series as they stand on a page."""
    return dict(re.findall(r'([A-Za-z_]+)="([^"]*)"', name))


@contextmanager
def agents() -> Iterator[dict[str, AgentProcess]]:
    """Both nodes' agents, with every holder in sight."""
    with ExitStack() as stack:
        found = {}
        for node, (file, words) in NODES.items():
            simulated = ("--simulate", str(FIXTURES / file), "--dcgm-pod-uid", "on", "--sample-interval", "500ms")
            found[node] = stack.enter_context(running_agent(*simulated, *words, env={"NODE_NAME": node}))
        for node, agent in found.items():
            agent.until(
                lambda page, node=node: (  # type: ignore[misc] # mypy knows no defaults of a lambda
                    {
                        labels["pod"]
                        for name in page
                        if name.startswith("DCGM_FI_PROF_GR_ENGINE_ACTIVE") and "pod_uid" in (labels := labels_in(name))
                    }
                    >= HOLDERS[node]
                ),
                f"every holder of {node} with its uid",
            )
        yield found


@contextmanager
def kube_state_metrics() -> Iterator[str]:
    """The address of a page as kube-state-metrics has one, of the pods that hold GPUs."""
    lines = []
    for pod, namespace in NAMESPACES.items():
        labels = f'namespace="{namespace}",pod="{pod}",uid="{pod}"'
        lines.append(f'kube_pod_status_phase{{{labels},phase="Running"}} 1')
        lines.append(f"kube_pod_created{{{labels}}} 1600000000")
        resource = 'container="main",resource="nvidia_com_gpu",unit="integer"'
        lines.append(f"kube_pod_container_resource_requests{{{labels},{resource}}} 1")
    with page_server(lambda: "\n".join(lines) + "\n") as address:
        yield address


def jobs(found: Mapping[str, AgentProcess], state: str, folder: Path, *, honor: bool) -> list[Document]:
    """The agents as the Prometheus operator scrapes them by the chart's monitor, and kube-state-metrics."""
    values = f"monitoring: {{podMonitor: {{enabled: true}}, scrape: {{honorLabels: {str(honor).lower()}}}}}"
    monitor = next(one for one in documents(values=values) if one["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    name = of_kind(documents(values=values), "DaemonSet")["metadata"]["name"]
    ours = []
    for node, agent in found.items():
        pod = {"namespace": "gpu-cost", "pod": f"{name}-x7x7x", "container": "agent", "endpoint": "metrics"}
        labels = {**pod, "instance": node}
        ours.append(scrape_config(endpoint, node, f"127.0.0.1:{agent.port}", labels, folder))
    ksm = {"job_name": "kube-state-metrics", "honor_labels": True, "static_configs": [{"targets": [state]}]}
    return [*ours, ksm]


@contextmanager
def prometheuses(found: Mapping[str, AgentProcess], folder: Path) -> Iterator[dict[bool, Scraper]]:
    """A Prometheus that honours labels and one that does not, each with several scrapes of both nodes."""
    with ExitStack() as stack:
        state = stack.enter_context(kube_state_metrics())
        servers = {}
        for honor in (True, False):
            place = folder / str(honor)
            place.mkdir()
            servers[honor] = stack.enter_context(
                scraping(place, jobs(found, state, place, honor=honor), rules=[PUBLIC_RULES])
            )
        for server in servers.values():
            server.until('count_over_time(up{job="gpu-cost-exporter"}[1m]) >= 4', count=2)
        yield servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A sample as OpenCost's collector reads it."""

    name: str
    labels: dict[str, str]
    value: float


class PageError(ValueError):
    """OpenCost's parser refuses the whole page, and with it the target."""


_SKIPPED = re.compile(r"[^#{},=\"\w.+-]+", re.ASCII)
_TOKENS = (
    ("comment", re.compile(r"#[^\n]*(?:\n|$)")),
    ("sign", re.compile(r"[{},=]")),
    ("string", re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)),
    ("word", re.compile(r"[A-Za-z][A-Za-z0-9_]*")),
    # Takes the character after it, too.
    ("value", re.compile(r"([0-9.+\-][NaInf+\-._eE0-9]*).?", re.DOTALL)),
    # What its lexer knows nothing of it leaves out without a word: a name's first underline, a colon.
    ("nothing", re.compile(r"_")),
)
_ESCAPES = {r"\n": "\n", r"\\": "\\", r"\"": '"'}


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        if found := _SKIPPED.match(text, place):
            place = found.end()
            continue
        for kind, pattern in _TOKENS:
            if found := pattern.match(text, place):
                place = found.end()
                value = found[found.lastindex or 0]
                if kind == "string":
                    value = re.sub(r'\\[n\\"]', lambda one: _ESCAPES[one[0]], value)
                if kind not in {"comment", "nothing"}:
                    yield ("value" if kind == "word" and value in {"NaN", "Inf"} else kind), value
                break
        else:
            raise PageError(f"an open string at {text[place : place + 40]!r}")


def opencost_reads(text: str) -> list[Record]:
    """A page, by the rules of the parser of OpenCost's collector (2026): newlines mean nothing, one fault refuses all.

    Raises:
        PageError: Something stands where it does not expect it.
    """
    tokens = [*_tokens(text), ("end", "")]
    found, place = [], 0

    def take(kind: str, sign: str = "") -> str:
        nonlocal place
        token = tokens[place]
        if token[0] != kind or (sign and token[1] != sign):
            raise PageError(f"expected {sign or kind}, got {token} after {tokens[max(0, place - 6) : place]}")
        place += 1
        return token[1]

    while tokens[place][0] != "end":
        name, labels = take("word"), {}
        if tokens[place] == ("sign", "{"):
            place += 1
            while tokens[place] != ("sign", "}"):
                if tokens[place] == ("sign", ","):
                    place += 1
                    continue
                label = take("word")
                take("sign", "=")
                labels[label] = take("string")
            place += 1
        value = float(take("value"))
        if tokens[place][0] == "value":
            int(take("value"))
        found.append(Record(name=name, labels=labels, value=value))
    return found
