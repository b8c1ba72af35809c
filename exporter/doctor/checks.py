"""Runs all checks in the order of their dependencies, and finds the layer of the node that failed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from exporter.accounting.prices import PriceBook, PricedGpu, settled_facts
from exporter.agent.run import attributor_of
from exporter.attribution.pod_lifecycle import PodName
from exporter.attribution.tenants import TenantSource
from exporter.config import AgentConfig, price_book
from exporter.doctor import kubernetes, machine, sources
from exporter.doctor.findings import Examination, Finding, Level, Surroundings, fail, first_of, ok, warn
from exporter.errors import ConfigError
from exporter.gpu.merge import alone, merge, supplement
from exporter.metrics.collectors_file import Collectors
from exporter.model.attribution import Allocations, Attribution, NodeFacts, PodFacts
from exporter.model.devices import DeviceState, Reading
from exporter.model.formatting import plural, some

_SHOWN = 3


def of_holders(
    config: AgentConfig, attribution: Attribution, facts_of: Callable[[str, str], PodFacts | None]
) -> Finding:
    """Check that each pod with a GPU has an owner with a team, and only labels and annotations that are understood."""
    name = "owners"
    pods = sorted(kubernetes.holders(attribution))
    facts = {pod: facts_of(*pod) for pod in pods}
    unknown = [pod for pod in pods if facts[pod] is None]
    without_team = [pod for pod, known in facts.items() if known and not known.owner.team]
    wrong = {pod: known.problems for pod, known in facts.items() if known and known.problems}
    of = f"of {len(pods)} pods that hold GPUs"
    if unknown:
        fix = "they are charged to themselves; see that --node-name is this node and the kubelet is this cluster's"
        return warn(name, f"{len(unknown)} {of} are not known to the API: {_listed(unknown)}", fix)
    if wrong:
        pod, problems = next(iter(wrong.items()))
        said = ", ".join(problems).replace("_", " ")
        fix = "fix the pod's label or annotation; of a controller of an unknown kind name the team; see docs/owners.md"
        return warn(name, f"{len(wrong)} {of} say what cannot be understood: {'/'.join(pod)} ({said})", fix)
    if without_team:
        keys = ", ".join(config.owners.team_keys) or "nothing yet: --team-keys names the labels"
        where = "the pod or its namespace" if config.owners.namespace_teams else "the pod"
        fix = f"label {where} with one of: {keys}"
        return warn(name, f"{len(without_team)} {of} have no team: {_listed(without_team)}", fix)
    return ok(name, f"owner and team known of all {len(pods)} pods that hold GPUs")


def _listed(pods: Sequence[PodName]) -> str:
    return some(["/".join(pod) for pod in pods], _SHOWN)


def node_labels(facts: NodeFacts | None) -> Finding:
    """Check that the node's labels were read, and show those that prices depend on."""
    name = "node labels"
    if facts is None:
        return warn(name, "cannot be read: GPUs are unpriced where the price may depend on them", _GRANT_NODES)
    known = (facts.instance_type, facts.capacity_type, facts.region, facts.gpu_product)
    return ok(name, ", ".join(filter(None, known)) or "say nothing of instance type, capacity type, region and product")


_NAME = "price book"
_GRANT_NODES = "grant verb get on resource nodes, or set --instance-type, --capacity-type and --region"
_ADD_ROW = (
    "add a row; one that asks for region, instance or capacity type needs the option of that name, "
    "or the node's label and --kube-metadata on"
)


def book(config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float) -> Finding:
    """Check the price book: mistakes stop the start, and a GPU without a price has GPU-hours but no money.

    Args:
        config: Path of the book, and facts of the node.
        labelled: Facts in the node's labels; empty if the API is not used, ``None`` if they could not be read.
        reading: The GPUs of this node; ``None`` if they are not known.
        now: Unix time, at which prices are looked up.
    """
    try:
        read = price_book.load(config.prices.book)
    except ConfigError as error:
        return fail(_NAME, first_of(error), "fix it, and try it: gpu-cost-exporter prices check FILE")
    if not read.rows and read.fallback is None:
        return ok(_NAME, "none: no prices, no money")
    listed = [one for one in (read, read.fallback) if one is not None and one.rows]
    books = "; else ".join(map(_summary, listed)) + ("" if read.fallback else "; no list prices behind it")
    if unpriced := _unpriced(read, config, labelled, reading, now):
        why = "" if labelled else ": it may depend on the node's labels, which could not be read"
        fix = _ADD_ROW if labelled else _GRANT_NODES
        return warn(_NAME, f"{books}; no price for {', '.join(unpriced)}{why}", fix)
    if read.warnings:
        return warn(_NAME, f"{books}; {first_of(read.warnings)}", "see: gpu-cost-exporter prices check FILE")
    if max(row.price.as_of for row in listed[0].rows) > datetime.fromtimestamp(now, tz=UTC).date().isoformat():
        return warn(_NAME, f"{books}: as_of lies in the future", "as_of is the day of the source, not of the effect")
    return ok(_NAME, books)


def _summary(read: PriceBook) -> str:
    days = sorted(row.price.as_of for row in read.rows)
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{read.name}: {plural(len(read.rows), 'row')}, {read.currency}, as of {period}"


def _unpriced(
    read: PriceBook, config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float
) -> list[str]:
    """Return the models of this node's GPUs that have no price."""
    facts = settled_facts(config.prices.node_facts, labelled or NodeFacts())
    models = sorted({gpu.gpu.model for gpu in reading.gpus}) if reading else []
    gpus = [PricedGpu(model, config.attribution.node_name, facts, labelled is not None) for model in models]
    return [gpu.model for gpu in gpus if read.price(gpu, now) is None]


NVML, DCGM = "NVML", "DCGM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Number of physical GPUs that each layer knows; ``None`` if it is unknown."""

    on_bus: int | None = None
    """NVIDIA GPUs on the PCI bus that are not passed through to virtual machines."""
    in_driver: int | None = None
    """GPUs of the kernel driver of the host."""
    seen: int | None = None
    """GPUs that NVML or DCGM lists here; ``None`` if it does not work."""
    shown_by: str = NVML
    advertised: int | None = None
    """GPUs that are healthy for the kubelet, or in the slices of a DRA driver; ``None`` if unknown."""
    allocated: int | None = None
    """GPUs with a holder, seen here or not."""
    inventory_refused: bool = False
    """Whether the kubelet refused to list the advertised devices."""
    by_claims: bool = False
    """Whether DRA allocates devices of this node; a kubelet that advertises none is then correct."""

    @property
    def there(self) -> int | None:
        """GPUs of the driver, or of the PCI bus if that is unknown; a bus without GPUs (Tegra, WSL) is ignored."""
        return self.in_driver if self.in_driver is not None else self.on_bus or None

    @property
    def place(self) -> str:
        """Layer in which ``there`` was counted."""
        return "PCI bus" if self.in_driver is None else "driver"

    @property
    def known(self) -> int:
        """GPUs that the kubelet knows."""
        return max(self.advertised or 0, self.allocated or 0)


_LAYERS = "layers"
_DRIVER, _TOOLKIT, _PLUGIN, _KUBELET = "driver", "container toolkit", "device plugin", "kubelet"
"""Layers between the hardware and a pod, from below."""
_DRIVER_LOG = "see the kernel log (dmesg | grep -i -e nvrm -e xid), then reset the GPU or restart the node"
_LOAD_DRIVER = "load the driver (modprobe nvidia), or see the driver's pod of the GPU operator"
_SHOW_ALL = "see all GPUs: runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=all"
_PLUGIN_LOG = (
    "see the device plugin's log for the unhealthy device and the kernel log for its Xid; "
    "a resource of another name needs --gpu-resources"
)
_PLUGIN_MISSING = (
    "see that the device plugin's pod runs on this node; after a restart of the kubelet it registers within a minute; "
    "where devices are given out by claims (DRA) alone nothing is wrong, and --kube-metadata on knows that"
)
_PLUGIN_LATE = "it registers within a minute after the kubelet's start; else restart the device plugin's pod"


def diagnose(counts: Counts) -> Finding:
    """Find the lowest layer that knows fewer GPUs than the one below it; no layer above it can be right.

    Args:
        counts: Counts of one instant. Two known layers are compared even if a layer between them is unknown.
    """
    return _below_driver(counts) or _below_container(counts) or _above(counts)


def _failed(layer: str, cause: str, fix: str) -> Finding:
    level = fail if layer in {_DRIVER, _TOOLKIT} else warn
    return level(_LAYERS, f"{layer}: {cause}", fix)


def _below_driver(counts: Counts) -> Finding | None:
    bus, driver, there = counts.on_bus, counts.in_driver, counts.there
    if bus and driver is None and not counts.seen and not counts.advertised:
        return _failed(_DRIVER, f"the PCI bus has {_gpus(bus)}, and no driver is loaded", _LOAD_DRIVER)
    if bus is not None and driver is not None and driver < bus:
        return _failed(_DRIVER, f"the PCI bus has {_gpus(bus)}, the driver has taken {driver}", _DRIVER_LOG)
    if there is not None and counts.known > there:
        cause = f"the kubelet knows {_gpus(counts.known)}, the {counts.place} has {there} now: one fell off the bus"
        return _failed(_DRIVER, cause, _DRIVER_LOG)
    return None


def _below_container(counts: Counts) -> Finding | None:
    """Compare the GPUs that are listed here with those of the driver.

    The device plugin uses the same driver from another container, so its count shows which layer fails.
    """
    seen, advertised = counts.seen or 0, counts.advertised or 0
    there = max(counts.there or 0, counts.known)
    if there <= seen:
        return None
    where = "this container" if counts.shown_by == NVML else "its engine's container"
    shown = f"{counts.shown_by} {'does not work' if counts.seen is None else f'shows {counts.seen}'} here"
    if counts.there is not None:
        shown = f"the {counts.place} has {_gpus(counts.there)}, {shown}"
    if advertised <= seen and (advertised or counts.known > seen):
        rest = f"to {where} and to the device plugin" if advertised else "any more"
        return _failed(_DRIVER, f"{shown}: the driver does not give all of {there} {rest}", _DRIVER_LOG)
    more = f"; the device plugin is shown {advertised}" if advertised else ""
    return _failed(_TOOLKIT, f"{shown}{more}", f"let {where} {_SHOW_ALL}")


def _above(counts: Counts) -> Finding:
    seen, advertised = counts.seen or 0, counts.advertised
    if advertised is None and counts.allocated is None:
        blind = f"{counts.shown_by} does not work here, so no GPU is known"
        here = f"{_gpus(seen)} here" if counts.seen is not None else blind
        return ok(_LAYERS, f"{here}; which of them are allocated is not known")
    if (counts.by_claims and not advertised) or (counts.inventory_refused and advertised is None):
        return _ok(counts, "given out by claims (DRA)" if counts.by_claims else "advertised devices not known")
    if advertised is None:
        too_old = "the kubelet is too old: use 1.23 or newer"
        return _failed(_KUBELET, "the kubelet does not report its devices", too_old)
    if not advertised and seen:
        return _nothing_advertised(seen, counts.allocated)
    if advertised < seen:
        plugin = "DRA driver or device plugin" if counts.by_claims else "device plugin"
        cause = f"the driver shows {_gpus(seen)}, the {plugin} advertises {advertised} as healthy"
        return _failed(_PLUGIN, cause, _PLUGIN_LOG)
    return _ok(counts, "advertised")


def _nothing_advertised(seen: int, allocated: int | None) -> Finding:
    # The kubelet's checkpoint keeps allocations after the plugin's registration ends.
    if allocated:
        cause = f"{allocated} of {_gpus(seen)} are held and none is advertised: the device plugin is not registered"
        return _failed(_KUBELET, cause, _PLUGIN_LATE)
    cause = f"the driver shows {_gpus(seen)}, no device plugin advertises one"
    return _failed(_PLUGIN, cause, _PLUGIN_MISSING)


def _ok(counts: Counts, how: str) -> Finding:
    seen, advertised = counts.seen or 0, counts.advertised
    if not seen:
        return ok(_LAYERS, "no GPU here, and no layer knows one")
    number = "" if advertised is None else f"{advertised} "
    held = "" if counts.allocated is None else f", {counts.allocated} held"
    return ok(_LAYERS, f"{_gpus(seen)} here, {number}{how}{held}")


def _gpus(count: int) -> str:
    return plural(count, "GPU")


_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_PASSED_THROUGH = "vfio-pci"
_UNKNOWN = Attribution(known=False)


def layer_agreement(
    around: Surroundings,
    reading: Reading | None,
    attribution: Attribution = _UNKNOWN,
    allocations: Allocations | None = None,
    *,
    inventory_refused: bool = False,
) -> Finding:
    """Compare PCI bus, kernel driver, NVML or DCGM, and kubelet.

    Args:
        around: Paths of bus and driver, and the source of readings.
        reading: The last reading; ``None`` if no source works.
        attribution: The join.
        allocations: The kubelet's answer.
        inventory_refused: Whether the kubelet refused to list the advertised devices.
    """
    by_dcgm = around.config.sampling.source == "dcgm"
    # A host engine may be shown another machine's GPUs, or others of this one's.
    by_host = not around.simulated and not by_dcgm
    counts = Counts(
        on_bus=on_bus(around.sys_root) if by_host else None,
        in_driver=in_driver(around.config.attribution.proc_root) if by_host else None,
        seen=sum(gpu.state is not DeviceState.MISSING for gpu in reading.gpus) if reading else None,
        advertised=attribution.advertised_devices,
        allocated=attribution.allocated_devices,
        by_claims=allocations is not None and any(container.claims for container in allocations.containers),
        shown_by=DCGM if by_dcgm else NVML,
        inventory_refused=inventory_refused,
    )
    return diagnose(counts)


def on_bus(sys_root: Path) -> int | None:
    """Count NVIDIA's GPUs on the PCI bus that are not passed through to virtual machines; ``None`` without sysfs."""
    try:
        return sum(_is_gpu(device) for device in (sys_root / "bus" / "pci" / "devices").iterdir())
    except OSError:
        return None


def in_driver(proc_root: Path) -> int | None:
    """Count the GPUs of the kernel driver; ``None`` where it does not report them, or only those of a container.

    The container toolkit mounts a directory of the container's own GPUs over the driver's.
    """
    place = proc_root / "driver" / "nvidia"
    try:
        mounts = (proc_root / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mounts = ""
    if any(line.split()[4:5] == [str(place)] for line in mounts.splitlines()):
        return None
    try:
        return sum(1 for _ in (place / "gpus").iterdir())
    except OSError:
        return None


def _is_gpu(device: Path) -> bool:
    try:
        if (device / "vendor").read_text(encoding="ascii").strip() != _NVIDIA:
            return False
        if not (device / "class").read_text(encoding="ascii").startswith(_DISPLAY_CLASSES):
            return False
        driver = device / "driver"
        return not driver.is_symlink() or driver.readlink().name != _PASSED_THROUGH
    except (OSError, UnicodeDecodeError):
        return False


_NO_PROCESSES = warn(
    "processes",
    "DCGM reports none: use of shared devices is estimated, not measured",
    "--source auto reads them from NVML, where the agent runs on the driver's machine",
)


async def examine(around: Surroundings) -> Examination:
    """Run all checks, which takes some seconds: at most the deadlines of driver and kubelet."""
    config = around.config
    wall, began = around.wall(), around.monotonic()
    of_collectors, made = machine.collectors(config)
    (of_nvml, nvml), (of_dcgm, from_dcgm) = await asyncio.gather(_nvml(around, made), _dcgm(around, made))
    found = [*of_nvml, *of_dcgm]
    if from_dcgm:
        rows = {row.field.field: row.name for row in made.dcgm_only}
        found += [sources.engine_devices(from_dcgm, nvml), sources.profiling(from_dcgm, nvml)]
        found.append(sources.fields(rows, from_dcgm))
    reading, _ = merge(nvml, from_dcgm)
    if reading:
        found.append(sources.activity(reading, dcgm=bool(config.sampling.dcgm_address)))
        found.append(sources.processes(reading) if nvml else _NO_PROCESSES)
    of_owners, labelled = await _attribution(around, reading)
    found += of_owners
    found.append(machine.process_tree(config.attribution.proc_root))
    if config.attribution.workload_manager == "kubernetes":
        found.append(machine.pod_logs(config.attribution.pod_log_root))
    found += [machine.state_dir(config.running.state_dir), machine.writer_lock(config)]
    listen = config.serving.listen
    found += [machine.port(listen.host, listen.port), of_collectors, *machine.options(config)]
    if config.serving.web_config:
        found.append(machine.face(config.serving.web_config))
    found.append(book(config, labelled, reading, wall))
    found.append(machine.clock(wall))
    readings = tuple(one for one in (nvml, from_dcgm) if one)
    findings = tuple(one for one in found if one)
    return Examination(findings=findings, readings=readings, seconds=around.monotonic() - began)


async def _nvml(around: Surroundings, made: Collectors) -> tuple[list[Finding], Reading | None]:
    """Check driver and devices, if NVML is a source; also return its last reading."""
    config = around.config
    if config.sampling.source == "dcgm":
        return [], None
    found = [] if around.simulated else [machine.device_nodes(around.dev_root)]
    finding, reading = await sources.driver(around, made.fields)
    found.append(finding)
    if reading:
        found.append(sources.driver_devices(reading))
    return found, reading


async def _dcgm(around: Surroundings, made: Collectors) -> tuple[list[Finding | None], Reading | None]:
    """Check the engine, if DCGM is a source; also return its last reading."""
    config = around.config
    if not config.sampling.dcgm_address:
        return [await sources.hint()] if config.sampling.source == "auto" and not around.simulated else [], None
    fields = (alone if config.sampling.source == "dcgm" else supplement)(made.fields)
    return await sources.engine(around, fields)


async def _attribution(around: Surroundings, reading: Reading | None) -> tuple[list[Finding], NodeFacts | None]:
    """Return findings on holders, owners and layers of the node, and the facts in its labels."""
    config, now = around.config, around.wall()
    at_once = replace(config, owners=replace(config.owners, kube_start_jitter_seconds=0.0))
    attributor = attributor_of(at_once, around.wall)
    source = attributor.kubelet
    if source is None:
        off = warn("kubelet", "attribution is off: no pod is named", "set --attribution on")
        return [off, layer_agreement(around, reading, attributor.join(reading, now, 0.0))], NodeFacts()
    if isinstance(source, TenantSource):
        held = kubernetes.workload_holders(config, source, reading, now)
        return [held, layer_agreement(around, reading)], NodeFacts()
    asked = await kubernetes.ask_kubelet(around, source)
    of_api, api = await kubernetes.ask_api(around, attributor, reading)
    attribution = attributor.join(reading, around.wall(), 0.0)
    refused = source.latest is not None and asked.level is Level.WARN
    found = [asked, *of_api, layer_agreement(around, reading, attribution, source.latest, inventory_refused=refused)]
    if attribution.known and reading:
        found.append(kubernetes.agreement(attribution))
    if api and attribution.known:
        # Without the driver no holder is known.
        found += [of_holders(config, attribution, api.facts)] if reading else []
        found.append(node_labels(api.node_facts))
    if not config.owners.kube_metadata:
        return found, NodeFacts()
    return found, api.node_facts if api else None
