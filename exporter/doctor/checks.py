"""Runs all checks in the order in which they depend on each other."""

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from exporter.accounting.prices import PriceBook, settled_facts
from exporter.attribution.pod_lifecycle import NO_EVIDENCE
from exporter.config import AgentConfig, price_book
from exporter.doctor import host_engine, kubernetes, machine
from exporter.doctor.findings import Finding, Level, Surroundings, fail, first_of, ok, some, warn
from exporter.doctor.host_engine import LibraryReport
from exporter.doctor.layers import layer_agreement
from exporter.errors import ConfigError
from exporter.gpu.merge import alone, merge, supplement
from exporter.metrics.collectors_file import Collectors
from exporter.model import Attribution, NodeFacts, PodFacts, Reading

_SHOWN = 3
# Of a product's name what says nothing of the model: memory, form and ways of sharing.
_NO_MODEL = re.compile(
    r"[0-9]+g[bi]?b?|sxm[0-9]*|hbm[0-9]*[a-z]*|pcie|nvl[0-9]*|mig|[0-9]{1,3}c?[0-9]{0,3}g\.[0-9]{1,6}gb", re.ASCII
)


def of_holders(
    config: AgentConfig, attribution: Attribution, facts_of: Callable[[str, str], PodFacts | None]
) -> Finding:
    """Every pod that holds a GPU should have an owner with a team, and say nothing that cannot be understood."""
    name = "owners"
    pods = sorted(kubernetes.holders(attribution))
    facts = {pod: facts_of(*pod) for pod in pods}
    unknown = [pod for pod in pods if facts[pod] is None]
    without_team = [pod for pod, known in facts.items() if known and not known.owner.team]
    wrong = {pod: known.problems for pod, known in facts.items() if known and known.problems}
    of = f"of {len(pods)} pods that hold GPUs"
    if unknown:
        return warn(
            name,
            f"{len(unknown)} {of} are not known to the API: {some(['/'.join(pod) for pod in unknown], _SHOWN)}",
            "they are charged to themselves; see that --node-name is this node and the kubelet is this cluster's",
        )
    if wrong:
        pod, problems = next(iter(wrong.items()))
        said = ", ".join(problems).replace("_", " ")
        return warn(
            name,
            f"{len(wrong)} {of} say what cannot be understood: {'/'.join(pod)} ({said})",
            "fix the pod's label or annotation; of a controller of an unknown kind name the team; see docs/owners.md",
        )
    if without_team:
        keys = ", ".join(config.team_keys) or "nothing yet: --team-keys names the labels"
        where = "the pod or its namespace" if config.namespace_teams else "the pod"
        return warn(
            name,
            f"{len(without_team)} {of} have no team: {some(['/'.join(pod) for pod in without_team], _SHOWN)}",
            f"label {where} with one of: {keys}",
        )
    return ok(name, f"owner and team known of all {len(pods)} pods that hold GPUs")


def node_labels(facts: NodeFacts | None, reading: Reading | None) -> Finding:
    """The product in the node's labels should be the driver's model; prices go by the driver's word."""
    name = "node labels"
    if facts is None:
        return warn(
            name,
            "cannot be read: GPUs are unpriced where the price may depend on them",
            "grant verb get on resource nodes, or set --instance-type, --capacity-type and --region",
        )
    known = (facts.instance_type, facts.capacity_type, facts.region, facts.gpu_product)
    told = ", ".join(filter(None, known)) or "say nothing of instance type, capacity type, region and GPU product"
    models = sorted({gpu.gpu.model for gpu in reading.gpus}) if reading else []
    if models and not any(_is_same(facts.gpu_product, model) for model in models):
        return warn(
            name,
            f"say {facts.gpu_product}, the driver says {', '.join(models)}",
            "the labels are of an earlier GPU: restart gpu-feature-discovery on this node",
        )
    return ok(name, told)


def _is_same(product: str, model: str) -> bool:
    """Tell whether two spellings can mean one model; a label without a model's number is never wrong."""
    named = [word for word in _words(product) if any(map(str.isdigit, word)) and not _NO_MODEL.fullmatch(word)]
    return not named or named[0] in _words(model)


def _words(text: str) -> list[str]:
    return re.split(r"[\s_-]+", text.lower())


_NAME = "price book"


def book(config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float) -> Finding:
    """A book with mistakes stops the start; a GPU without a price has GPU-hours but no money.

    Args:
        config: Names the book, and says what the node is.
        labelled: What the node's labels say; empty if the API is not used, ``None`` if they could not be read.
        reading: The GPUs of this node, ``None`` where they are not known.
        now: Unix time, at which prices are looked up.
    """
    try:
        read = price_book.load(config.price_book)
    except ConfigError as error:
        return fail(_NAME, first_of(error), "fix it, and try it: gpu-cost-exporter prices check FILE")
    if not read.rows and read.fallback is None:
        return ok(_NAME, "none: no prices, no money")
    told = _told(read)
    unpriced = _unpriced(read, config, labelled, reading, now)
    if unpriced:
        return _without_price(f"{told}; no price for {', '.join(unpriced)}", labels_read=labelled is not None)
    if read.warnings:
        return warn(_NAME, f"{told}; {first_of(read.warnings)}", "see: gpu-cost-exporter prices check FILE")
    today = datetime.fromtimestamp(now, tz=UTC).date().isoformat()
    if _days(read)[-1] > today:
        return warn(_NAME, f"{told}: as_of lies in the future", "as_of is the day of the source, not of the effect")
    return ok(_NAME, told)


def _without_price(cause: str, *, labels_read: bool) -> Finding:
    if labels_read:
        return warn(
            _NAME,
            cause,
            "add a row; one that asks for region, instance or capacity type needs the option of that name, "
            "or the node's label and --kube-metadata on",
        )
    return warn(
        _NAME,
        f"{cause}: it may depend on the node's labels, which could not be read",
        "grant verb get on resource nodes, or set --instance-type, --capacity-type and --region",
    )


def _told(read: PriceBook) -> str:
    books = [_one(one) for one in (read, read.fallback) if one is not None and one.rows]
    return "; else ".join(books) if read.fallback else f"{books[0]}; no list prices behind it"


def _one(read: PriceBook) -> str:
    first, last = _days(read)[0], _days(read)[-1]
    period = first if first == last else f"{first} to {last}"
    rows = "1 row" if len(read.rows) == 1 else f"{len(read.rows)} rows"
    return f"{read.name}: {rows}, {read.currency}, as of {period}"


def _days(read: PriceBook) -> list[str]:
    """The days of the sources, the oldest first."""
    rows = read.rows or (read.fallback.rows if read.fallback else ())
    return sorted(row.price.as_of for row in rows)


def _unpriced(
    read: PriceBook, config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float
) -> list[str]:
    given = NodeFacts(instance_type=config.instance_type, capacity_type=config.capacity_type, region=config.region)
    price = partial(
        read.price,
        node=config.node_name,
        facts=settled_facts(given, labelled or NodeFacts()),
        at_seconds=now,
        facts_complete=labelled is not None,
    )
    models = sorted({gpu.gpu.model for gpu in reading.gpus}) if reading else []
    return [model for model in models if price(model=model) is None]


_NO_PROCESSES = warn(
    "processes",
    "DCGM tells none: use of shared devices is estimated, not measured",
    "--source auto reads them from NVML, where the agent runs beside the driver",
)


async def examine(around: Surroundings) -> tuple[Finding, ...]:
    """All findings; takes some seconds, at most the driver's deadline and the kubelet's."""
    config = around.config
    wall, monotonic = around.wall(), around.monotonic()
    of_collectors, made = machine.collectors(config)
    (found, nvml), (of_dcgm, library, from_dcgm) = await asyncio.gather(_nvml(around, made), _dcgm(around, made))
    found += of_dcgm
    if from_dcgm:
        rows = {row.field.field: row.name for row in made.dcgm_only}
        judged = (
            host_engine.devices(from_dcgm, nvml),
            host_engine.profiling(from_dcgm, nvml),
            host_engine.fields(rows, library, from_dcgm),
        )
        found += [one for one in judged if one]
    reading, _ = merge(nvml, from_dcgm)
    if reading:
        found.append(machine.activity(reading, dcgm=bool(config.dcgm_address)))
        found.append(machine.processes(reading) if nvml else _NO_PROCESSES)
    of_owners, labelled = await _attribution(around, reading)
    found += of_owners
    found.append(machine.process_tree(config.proc_root))
    if config.workload_manager == "kubernetes":
        found.append(machine.pod_logs(config.pod_log_root))
    found += [machine.state_dir(config.state_dir), machine.writer_lock(config)]
    found += [machine.port(config.listen_host, config.listen_port), of_collectors, *machine.options(config)]
    if config.web_config:
        found.append(machine.face(config.web_config))
    found.append(book(config, labelled, reading, wall))
    found.append(machine.clock((wall, around.wall()), (monotonic, around.monotonic())))
    return tuple(found)


async def _nvml(around: Surroundings, made: Collectors) -> tuple[list[Finding], Reading | None]:
    """Binding, driver and devices, where NVML is asked; and its last reading."""
    config = around.config
    if config.source == "dcgm":
        return [], None
    found = [machine.package()]
    if not around.simulated:
        found += [machine.device_nodes(around.dev_root), machine.kernel_module(config.proc_root)]
    finding, reading = await machine.read(around, made.fields)
    found.append(finding)
    if reading:
        found.append(machine.devices(reading))
    return found, reading


async def _dcgm(around: Surroundings, made: Collectors) -> tuple[list[Finding], LibraryReport, Reading | None]:
    """Library and engine, where DCGM is in use; which library there is, and the engine's last reading."""
    config = around.config
    if not config.dcgm_address:
        hint = await host_engine.hint() if config.source == "auto" and not around.simulated else None
        return [hint] if hint else [], LibraryReport(), None
    fields = (alone if config.source == "dcgm" else supplement)(made.fields)
    return await host_engine.examine(around, fields)


async def _attribution(around: Surroundings, reading: Reading | None) -> tuple[list[Finding], NodeFacts | None]:
    """Who holds what, whose it is, which layer of the node stands in the way of knowing; and what its labels say."""
    config = around.config
    if config.attribution and config.workload_manager != "kubernetes":
        judged = layer_agreement(around, reading)
        return [kubernetes.workload_holders(config, reading, around.wall()), judged], NodeFacts()
    finding, allocations = await kubernetes.ask_kubelet(around)
    found, api = [finding], None
    if config.attribution and config.kube_metadata:
        of_api, api = await kubernetes.ask_api(around, allocations, reading)
        found += of_api
    elif config.attribution:
        found.append(kubernetes.off())
    evidence = api.evidence(around.wall()) if api else NO_EVIDENCE
    attribution = kubernetes.join(config, allocations, reading, evidence)
    refused = allocations is not None and finding.level is Level.WARN
    found.append(layer_agreement(around, reading, attribution, allocations, inventory_refused=refused))
    if attribution and reading:
        found.append(kubernetes.agreement(attribution))
    if api and attribution:
        # Without the driver it is not known who holds anything.
        found += [of_holders(config, attribution, api.facts)] if reading else []
        found.append(node_labels(api.node_facts, reading))
    if not (config.attribution and config.kube_metadata):
        return found, NodeFacts()
    return found, api.node_facts if api else None
