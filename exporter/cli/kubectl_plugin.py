"""Implements `kubectl gpu-cost`: GPUs, holders and waste of a cluster, from agents through `kubectl port-forward`."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from exporter.cli import top
from exporter.cli.common import Parser, command, refuse, unknown_flags
from exporter.cli.output import ended, put
from exporter.cost import agent_client
from exporter.cost.live import LiveRow, Picture, agent_picture, picture_of
from exporter.errors import ExporterError
from exporter.model.formatting import amounts, duration, gib, percent
from exporter.model.formatting import model as short_model

_PROGRAM = "kubectl gpu-cost"
_SELECTOR = "app.kubernetes.io/name=gpu-cost-exporter,app.kubernetes.io/component=agent"
_PORT = "metrics"
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")
_START_SECONDS = 20.0
_AT_A_TIME, _MOST_LIVE = 8, 32
_WASTE = ("Cluster", "Node", "GPU", "Model", "Holder", "Owner", "Team", "Idle for", "Per hour")
_WHO = ("Cluster", "Node", "GPU", "Model", "Holder", "Owner", "Team", "Held for")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plugin and return the exit code, as for gpu-cost-exporter."""
    return ended(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    parser = _parser()
    namespace, unknown = parser.parse_known_args(words)
    if namespace.command is None:
        parser.print_help()
        return 0
    problems = unknown_flags(unknown, namespace, program=_PROGRAM)
    refuse((*problems, *agent_client.access_problems(namespace, of_an_agent=True)))
    return int(asyncio.run(namespace.run(namespace)))


def _parser() -> Parser:
    about = "Show GPUs, holders and waste of a cluster, read from its gpu-cost-exporter agents through port-forwards."
    parser = Parser(prog=_PROGRAM, usage=f"{_PROGRAM} COMMAND [OPTION ...]", description=about)
    parser.epilog = f"Examples of a command: {_PROGRAM} COMMAND -h; all of its options: {_PROGRAM} COMMAND --help"
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog=_PROGRAM, parser_class=Parser)
    live = command(commands, "top", "Show all GPUs, live in the terminal.", ("", "--node node-a", "--once --sort cost"))
    top.add_view_options(live)
    live.epilog = top.EPILOG
    live.set_defaults(run=_top)
    waste = command(commands, "waste", "List holders of idle GPUs, the most expensive first.", ("", "--filter team-a"))
    waste.set_defaults(run=partial(_list, titles=_WASTE, keep=lambda row: row.is_idle))
    who = command(commands, "who", "List the holder of each GPU.", ("", "--node node-a"))
    who.set_defaults(run=partial(_list, titles=_WHO, sort="gpu"))
    for one in (waste, who):
        one.add_argument("--json", action="store_true", help="print JSON instead of a table")
        one.add_argument("--filter", default="", metavar="TEXT", help="only rows with these words, in any column")
    why = command(commands, "why", "Explain why a pod is idle, or has no GPU here.", ("trainer-0 -n vision",))
    why.add_argument("pod", metavar="POD", help="name of the pod, or NAMESPACE/NAME")
    why.add_argument("-n", "--namespace", metavar="NAME", help="its namespace [default: the context's]")
    why.set_defaults(run=_why)
    for one in (live, waste, who, why):
        one.usage = f"{one.prog} {'POD ' if one is why else ''}[OPTION ...]"
        group = one.add_argument_group("Cluster")
        group.add_argument("--context", metavar="NAME", help="context of the kubeconfig [default: the current one]")
        group.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig [default: kubectl's]")
        group.add_argument("--selector", default=_SELECTOR, help="labels of the agents' pods [default: %(default)s]")
        group.add_argument("--node", action="append", metavar="NAME", help="only this node; again for another")
        agent_client.add_agent_access(one)
    return parser


@dataclass(slots=True, kw_only=True)
class _Agent:
    """A running pod of the agent, and its port-forward."""

    kubectl: Sequence[str]
    namespace: str
    pod: str
    node: str
    port: int
    scheme: str
    _forward: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[bytes] | None = None
    _address: str = ""

    async def address(self) -> str:
        """Return the agent's address on this machine; start the port-forward, or restart one that has ended.

        Raises:
            ExporterError: kubectl cannot forward the port.
        """
        if self._forward is None or self._forward.returncode is not None:
            self._forward = await _started(
                *(*self.kubectl, "--namespace", self.namespace, "port-forward", "--address", "127.0.0.1"),
                *(f"pod/{self.pod}", f":{self.port}"),
            )
            try:
                self._address = f"{self.scheme}://127.0.0.1:{await self._local_port(self._forward)}"
            except ExporterError:
                await self.end()
                raise
        return self._address

    async def _local_port(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None  # noqa: S101 - a pipe
        said = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                async for line in process.stdout:
                    said = line.decode(errors="replace").strip() or said
                    if found := _FORWARDED.search(said):
                        # kubectl writes a line per connection, and would block on a full pipe.
                        self._reader = asyncio.create_task(process.stdout.read())
                        return found[1]
                raise ExporterError(f"kubectl port-forward: {said or 'no reason given'}")
        raise ExporterError(f"kubectl port-forward: no answer within {_START_SECONDS:g} s")

    async def end(self) -> None:
        """Stop kubectl."""
        if self._forward is not None:
            with suppress(ProcessLookupError):
                self._forward.terminate()
            await self._forward.wait()
        if self._reader is not None:
            await self._reader


async def _started(*words: str, errors: int = asyncio.subprocess.STDOUT) -> asyncio.subprocess.Process:
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        return await asyncio.create_subprocess_exec(*words, stdin=null, stdout=pipe, stderr=errors)
    except OSError as error:
        raise ExporterError(f"{words[0]}: {error.strerror}; install kubectl and put it on the PATH") from None


async def _get(namespace: argparse.Namespace, *words: str) -> Mapping[str, Any]:
    """Return the JSON output of `kubectl get`."""
    command = (*_kubectl(namespace), "get", *words, "--output", "json")
    process = await _started(*command, errors=asyncio.subprocess.PIPE)
    out, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ExporterError(f"kubectl get {' '.join(words)}: {lines[-1].strip()}")
    found: Mapping[str, Any] = json.loads(out)
    return found


def _kubectl(namespace: argparse.Namespace) -> tuple[str, ...]:
    given = (("--context", namespace.context), ("--kubeconfig", namespace.kubeconfig))
    return ("kubectl", *(word for flag, value in given if value for word in (flag, value)))


@asynccontextmanager
async def _agents(namespace: argparse.Namespace, nodes: Sequence[str] | None) -> AsyncIterator[list[_Agent]]:
    """Yield the running agents of the given nodes or of all nodes; their port-forwards end with the context.

    Raises:
        ExporterError: No agent was found.
    """
    listed = (await _get(namespace, "pods", "--all-namespaces", "--selector", namespace.selector))["items"]
    kubectl = _kubectl(namespace)
    found = [agent for pod in listed if (agent := _agent(kubectl, pod)) and (nodes is None or agent.node in nodes)]
    if not found:
        where = f"{' on ' if nodes else ''}{', '.join(nodes or ())} among {len(listed)} pods"
        fix = "give others by --selector, or see docs/troubleshooting.md#pods-that-are-not-there"
        raise ExporterError(f"no running agent{where} with the labels {namespace.selector}; {fix}")
    try:
        yield sorted(found, key=lambda agent: agent.node)
    finally:
        await asyncio.gather(*(agent.end() for agent in found))


def _agent(kubectl: Sequence[str], pod: Mapping[str, Any]) -> _Agent | None:
    if pod["status"].get("phase") != "Running" or pod["metadata"].get("deletionTimestamp"):
        return None
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == _PORT:
                probe = container.get("readinessProbe", {}).get("httpGet", {})
                return _Agent(
                    kubectl=kubectl,
                    namespace=pod["metadata"]["namespace"],
                    pod=pod["metadata"]["name"],
                    node=pod["spec"].get("nodeName", ""),
                    port=port["containerPort"],
                    scheme=probe.get("scheme", "HTTP").lower(),
                )
    return None


async def _picture(agents: Sequence[_Agent], namespace: argparse.Namespace, *, keep: bool) -> Picture:
    """Return the rows of all agents; an agent that cannot be read is a problem, or an error if none can be read.

    Args:
        agents: The agents.
        namespace: Access options.
        keep: Whether the port-forwards stay open for the next call.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def read_one(agent: _Agent) -> Picture:
        async with places:
            try:
                return await agent_picture(agent_client.client_of(namespace, await agent.address()), agent.node)
            except ExporterError as error:
                return Picture(rows=(), problems=(f"{agent.node}: {error}",))
            finally:
                if not keep:
                    await agent.end()

    read = await asyncio.gather(*map(read_one, agents))
    picture = Picture(
        rows=tuple(row for one in read for row in one.rows),
        simulated=any(one.simulated for one in read),
        problems=tuple(problem for one in read for problem in one.problems),
    )
    if not picture.rows and picture.problems:
        raise ExporterError(picture.problems[0])
    return picture


async def _top(namespace: argparse.Namespace) -> int:
    live = top.is_live(namespace)
    async with _agents(namespace, namespace.node) as agents:
        if live and len(agents) > _MOST_LIVE:
            raise ExporterError(
                f"{len(agents)} agents, and the live view keeps a port-forward to each, at most {_MOST_LIVE}; name"
                " nodes by --node, or take --once, or gpu-cost-exporter top --prometheus URL"
            )
        return await top.show(lambda: _picture(agents, namespace, keep=live), namespace)


async def _list(
    namespace: argparse.Namespace,
    titles: Sequence[str],
    sort: str = "waste",
    keep: Callable[[LiveRow], bool] = lambda _: True,
) -> int:
    """Print rows once; arguments as for ``top.write``."""
    async with _agents(namespace, namespace.node) as agents:
        picture = await _picture(agents, namespace, keep=False)
    return top.write(picture, namespace, titles, sort=sort, keep=keep)


async def _why(namespace: argparse.Namespace) -> int:
    of_name, _, name = namespace.pod.removeprefix("pod/").rpartition("/")  # as in tables: namespace/pod
    place = namespace.namespace or of_name
    pod = await _get(namespace, "pod", name, *(("--namespace", place) if place else ()))
    node = pod["spec"].get("nodeName")
    put(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" + (f" on {node}" if node else ""))
    if not node:
        phase = pod["status"].get("phase", "Unknown")
        put(f"  It is {phase} and on no node: the scheduler has not placed it; see: kubectl describe pod")
        return 0
    async with _agents(namespace, [node]) as agents:
        client = agent_client.client_of(namespace, await agents[0].address())
        document = await asyncio.to_thread(client.fetch, agent_client.DEVICES)
    put(*(f"  {line}" for line in explanation(pod, document, picture_of(document, node))))
    return 0


def explanation(pod: Mapping[str, Any], document: Mapping[str, Any], picture: Picture) -> Iterator[str]:
    """Yield the reason why a pod is idle, or has no GPU on its node.

    Args:
        pod: Pod object of the API server.
        document: The answer of its node's agent.
        picture: Rows of this answer.
    """
    name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    held = [row for row in picture.rows if (row.namespace, row.pod) == name]
    for row in held:
        yield from _of_device(row)
    if held and not document["metadata"]["enabled"]:
        yield "Its owner is its namespace: the agent reads no pods from the API. Set agent.metadata.enabled=true."
    unresolved = [one for one in document["unresolved"] if (one["namespace"], one["pod"]) == name]
    for one in unresolved:
        reason = one["reason"].replace("_", " ")
        yield (
            f"The kubelet lists {one['resource']} {one['device_id']}, which cannot be matched with a GPU: {reason}. Its"
            " time is Unattributed; see docs/troubleshooting.md#gpus-without-pods"
        )
    if not held and not unresolved:
        yield from _without_gpu(pod, document["attribution"])


def _without_gpu(pod: Mapping[str, Any], attribution: Mapping[str, Any]) -> Iterator[str]:
    wants = sorted(
        {
            resource
            for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
            for resource in container.get("resources", {}).get("limits", {})
            if re.search(r"gpu|/mig-", resource)
        }
    )
    claims = bool(pod["spec"].get("resourceClaims"))
    if not attribution["enabled"]:
        yield "The agent does not read holders: attribution is off. Set agent.attribution.enabled=true."
    elif not attribution["known"]:
        yield f"The agent does not know the holders now: {attribution['problem'] or 'the kubelet has not answered yet'}"
    elif not wants and not claims:
        yield "It requests no GPU: no container has a limit of a GPU resource, and the pod has no resource claim."
    elif (phase := pod["status"].get("phase")) != "Running":
        yield f"It requests {', '.join(wants) or 'a resource claim'} and is {phase}: it holds no GPU."
    else:
        asked = ", ".join(wants) or "a resource claim"
        yield (
            f"It requests {asked}, and the kubelet does not list it with a GPU. It may have just started; a GPU of an"
            " init container is not listed; another resource name needs --gpu-resources; a claim or a fraction needs"
            " agent.metadata.enabled=true. See docs/troubleshooting.md#gpus-without-pods"
        )


def _of_device(row: LiveRow) -> Iterator[str]:
    facts = [f"GPU {top.device(row)} ({short_model(row.model or 'unknown model')})"]
    facts += [f"held for {duration(row.age_seconds)}"] if row.age_seconds is not None else []
    facts += [f"{amounts(row.cost_per_hour)} per hour"] if row.cost_per_hour else []
    yield ", ".join(facts)
    if row.state != "allocated":
        yield f"  The device is {row.state.replace('_', ' ')}: {(row.unknown_reason or 'no reason').replace('_', ' ')}."
    elif row.activity_ratio is None:
        reason = (row.unknown_reason or "no reason given").replace("_", " ")
        yield f"  Its activity is not measured ({reason}), so it is unknown, not idle. See: gpu-cost-exporter doctor"
    elif not row.is_idle:
        yield f"  It is not idle: its activity is {percent(row.activity_ratio)} of the device now."
    else:
        yield f"  It is idle for {duration(row.idle_for_seconds or 0.0)}. {_cause(row.memory_used_bytes)}"
        yield "  What to do: docs/runbook.md#gpuunderutilised"


def _cause(memory_bytes: float | None) -> str:
    if memory_bytes is None:
        return "Whether it has memory on the GPU is not known."
    if not memory_bytes:
        return "It has no memory on the GPU: no process has begun to use it, or the work has ended."
    return (
        f"It keeps {gib(memory_bytes)} on the GPU and computes nothing: a model or notebook that is loaded and waits,"
        " or a program that waits for data."
    )
