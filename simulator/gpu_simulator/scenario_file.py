"""Scenario files: YAML into a checked plan, with every mistake told at once by file, line and key."""

import re

import yaml

from exporter.config.yaml_file import is_endless
from exporter.errors import ConfigError
from gpu_simulator.plan import DraMig, DraVersion, IdForm, MigStrategy, NodePlan, Plugin, Runtime
from gpu_simulator.scenario_faults import read_faults, read_xids
from gpu_simulator.scenario_gpus import read_gpus
from gpu_simulator.scenario_keys import Item, Problems, Section
from gpu_simulator.scenario_metadata import read_namespaces, read_texts
from gpu_simulator.scenario_pods import read_outside, read_pods
from gpu_simulator.truth import DcgmTruth

MOST_OTHER_PODS = 250
_DCGM_VERSION = re.compile(r"(?:3\.[3-9]|4\.\d{1,2})\.\d{1,2}")


def parse(text: str, source: str) -> NodePlan:
    """A plan from the text of a scenario file (format: docs/scenarios.md).

    Args:
        text: YAML.
        source: file name as the user knows it, for messages; its stem becomes the scenario's name.

    Raises:
        ConfigError: one line per mistake: file, line, key, what is wrong and what is allowed.
    """
    problems = Problems(source)
    item = _tree(text, problems)
    plan = _plan(Section(item, "", problems), problems, source) if item else None
    if problems.lines or plan is None:
        raise ConfigError(*problems.lines)
    return plan


def _plan(top: Section, problems: Problems, source: str) -> NodePlan:
    node = top.text("node")
    plugin = _plugin(top)
    gpus = read_gpus(top, node, plugin.ids)
    if not gpus and not problems.lines:
        top.problem("gpus", "is missing or empty; allowed: a list of boards, each with a model")
    pods = read_pods(top, gpus, plugin.ids)
    plan = NodePlan(
        name=source.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml"),
        description=top.text("description", "no description"),
        node=node,
        driver_version=top.text("driver", "590.48.01"),
        runtime=top.choice("runtime", Runtime.CONTAINERD),
        plugin=plugin,
        gpus=gpus,
        pods=(*pods, *read_outside(top, gpus)),
        faults=read_faults(top, len(gpus)),
        xids=read_xids(top, len(gpus)),
        other_pods=top.integer("other_pods", 0, high=MOST_OTHER_PODS),
        namespaces=read_namespaces(top),
        node_labels=read_texts(top, "node_labels"),
        dra_version=_dra_version(top, plugin),
        dcgm=_dcgm(top),
    )
    top.finish()
    return plan


def _plugin(top: Section) -> Plugin:
    section = top.section("plugin")
    if section is None:
        return Plugin()
    plugin = Plugin(
        ids=section.choice("ids", IdForm.UUID),
        mig_strategy=section.choice("mig_strategy", MigStrategy.MIXED),
        rename_shared=section.flag("rename_shared", default=False),
        dra_mig=section.choice("dra_mig", DraMig.STATIC),
    )
    if section.has("dra_mig") and plugin.ids is not IdForm.DRA:
        section.problem("dra_mig", f"means nothing with ids {plugin.ids.value}; allowed: only with dra")
    section.finish()
    return plugin


def _dra_version(top: Section, plugin: Plugin) -> str:
    """Of the API; a cluster whose driver needs none has none by default."""
    if not top.has("dra_version") and plugin.ids is not IdForm.DRA:
        return ""
    return top.choice("dra_version", DraVersion.V1).value


def _dcgm(top: Section) -> DcgmTruth:
    section = top.section("dcgm")
    if section is None:
        return DcgmTruth()
    version = section.text("version", DcgmTruth().version)
    if not _DCGM_VERSION.fullmatch(version):
        section.problem("version", f"is {version!r}; allowed: three numbers, from 3.3.0 to 4.99.99")
        version = DcgmTruth().version
    module = section.flag("profiling_module", default=True)
    section.finish()
    return DcgmTruth(version=version, profiling_module=module)


def _tree(text: str, problems: Problems) -> Item | None:
    """The file as values with lines; ``None`` after a mistake that leaves nothing to read."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problems.add(mark.line + 1 if mark else 1, f"is no YAML: {error.problem or error.context}")
        return None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # of \UFFFFFFFF
        problems.add(1, f"is no YAML: {str(error).splitlines()[0]}")
        return None
    if root is None:
        problems.add(1, "is empty; allowed: a scenario, see docs/scenarios.md")
        return None
    if is_endless(root):
        problems.add(1, "aliases (*) make far more of it than stands there; write them out")
        return None
    return _item(root, problems)


def _item(node: yaml.Node, problems: Problems) -> Item:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Item] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in found:
                problems.add(key_node.start_mark.line + 1, f"{key}: stands twice in one mapping")
            child = _item(value_node, problems)
            # A mistake in a value that begins on a line of its own is looked for at its key.
            found[key] = Item(child.value, key_node.start_mark.line + 1)
        return Item(found, line)
    if isinstance(node, yaml.SequenceNode):
        return Item(tuple(_item(child, problems) for child in node.value), line)
    return Item(_scalar(node, problems), line)


def _scalar(node: yaml.Node, problems: Problems) -> str | int | float | bool | None:
    """A scalar as YAML's safe schema reads it; a date is a text here."""
    if node.tag == "tag:yaml.org,2002:timestamp":
        return str(node.value)
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, OverflowError) as error:  # of !!bool maybe, !!int ''
        problems.add(node.start_mark.line + 1, f"cannot be read: {str(error).partition(chr(10))[0]}")
        return None
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
