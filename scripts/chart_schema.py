"""Reads the values of the Helm chart with their comments, and derives the JSON schema."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from exporter.config import types
from exporter.config.options import OPTIONS, Option
from exporter.config.resolve import MOST_KEYS
from exporter.config.types import OptionType
from exporter.service.settings import OPTIONS as SERVE_OPTIONS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
ANY_MAP: Schema = {"type": "object"}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": TEXT}


def closed(properties: Schema, *required: str) -> Schema:
    """Return the schema of an object without unknown keys."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": list(required)} if required else {})


def known(*keys: str) -> Schema:
    """Return the schema of an object with known keys; Kubernetes checks their values."""
    return closed({key: {} for key in keys})


def each(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def one_of(*words: str) -> Schema:
    """Return the schema of an enumeration."""
    return {"type": "string", "enum": list(words)}


def text(pattern: str) -> Schema:
    """Return the schema of a text that matches a pattern completely."""
    return {"type": "string", "pattern": f"^({pattern})$"}


KEY = text("[A-Za-z0-9._-]+")
NAME_OR_NOTHING = text("|[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
NAME_OF_OBJECTS = text("|[a-z]([a-z0-9-]*[a-z0-9])?")
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SPAN = text("([0-9]+(ms|s|m|h))+")
FOLDER = text("/.*")
FOLDER_BELOW = text("/[^/].*")
FOLDER_OR_NOTHING = text("|/[^/].*")
_SUFFIX = "([EPTGM]i?|Ki|k)"
QUANTITY: Schema = {
    "type": ["string", "number"],
    "pattern": f"^[0-9]+([.][0-9]+)?({_SUFFIX}|m|e[0-9]+)?$",
    "minimum": 0,
}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = closed({"limits": QUANTITIES, "requests": QUANTITIES})
_TIMES = ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "terminationGracePeriodSeconds")
PROBE = closed(dict.fromkeys((*_TIMES, "failureThreshold", "successThreshold"), NUMBER))
OPERATORS = one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
EXPRESSIONS = each(closed({"key": TEXT, "operator": OPERATORS, "values": each(TEXT)}, "key", "operator"))
SELECTOR = closed({"matchLabels": TEXT_MAP, "matchExpressions": EXPRESSIONS})
TOLERATIONS = each(
    closed(
        {
            "key": TEXT,
            "operator": one_of("Exists", "Equal"),
            "value": TEXT,
            "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
            "tolerationSeconds": NUMBER,
        }
    )
)
ENVIRONMENT = each(closed({"name": TEXT, "value": TEXT, "valueFrom": ANY_MAP}, "name"))
VOLUMES = each(ANY_MAP | {"required": ["name"]})
MOUNTS = each(ANY_MAP | {"required": ["name", "mountPath"]})
SECRET_KEY = closed({"name": TEXT, "key": TEXT, "optional": {"type": "boolean"}}, "name", "key")
FROM_EITHER = closed({"secret": SECRET_KEY, "configMap": SECRET_KEY})
TLS = closed(
    {
        "ca": FROM_EITHER,
        "cert": FROM_EITHER,
        "keySecret": SECRET_KEY,
        "serverName": TEXT,
        "insecureSkipVerify": {"type": "boolean"},
        "minVersion": one_of("TLS12", "TLS13"),
        "maxVersion": one_of("TLS12", "TLS13"),
    }
)
BASIC = closed({"username": SECRET_KEY, "password": SECRET_KEY}) | {
    "dependencies": {"username": ["password"], "password": ["username"]}
}
SERVICE_TYPE = one_of("ClusterIP", "NodePort", "LoadBalancer")
AUTO = "auto"
SWITCH_OR_AUTO: Schema = {"enum": [True, False, AUTO]}
NUMBER_OR_AUTO: Schema = {"type": ["integer", "string"], "pattern": f"^{AUTO}$", "minimum": 0}
TAG = text("|[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = text("|sha256:[a-f0-9]{64}")
CIDR = text("[0-9a-fA-F.:]+/[0-9]{1,3}")
PEERS = each(
    closed(
        {
            "namespaceSelector": SELECTOR,
            "podSelector": SELECTOR,
            "ipBlock": closed({"cidr": CIDR, "except": each(CIDR)}, "cidr"),
        }
    )
)
MAXIMUM: Schema = {"type": ["integer", "string"], "pattern": "^[1-9]?[0-9]%$|^100%$", "minimum": 0}

RELABELINGS = each(
    closed(
        {
            "sourceLabels": each(TEXT),
            "action": TEXT,
            "modulus": NUMBER,
            **dict.fromkeys(("separator", "targetLabel", "regex", "replacement"), TEXT),
        }
    )
)

BOOK = closed(
    {
        "currency": text("[A-Z]{3}"),
        "gpu_part": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "list_prices": {"enum": [True, False, "on", "off"]},
        "rows": each(ANY_MAP),
    }
) | {"type": ["object", "string"]}

_OF_BOTH = ("appArmorProfile", "runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions", "seccompProfile")

POD: Schema = {
    "extraArgs": each(TEXT),
    "extraEnv": ENVIRONMENT,
    "extraVolumes": VOLUMES,
    "extraVolumeMounts": MOUNTS,
    "nodeSelector": TEXT_MAP,
    "affinity": closed({"nodeAffinity": ANY_MAP, "podAffinity": ANY_MAP, "podAntiAffinity": ANY_MAP}),
    "tolerations": TOLERATIONS,
    "resources": RESOURCES,
    "podLabels": TEXT_MAP,
    "podAnnotations": TEXT_MAP,
    "podSecurityContext": known(
        *_OF_BOTH,
        *("fsGroup", "fsGroupChangePolicy", "seLinuxChangePolicy"),
        *("supplementalGroups", "supplementalGroupsPolicy", "sysctls"),
    ),
    "securityContext": known(
        *_OF_BOTH, *("allowPrivilegeEscalation", "capabilities", "privileged", "procMount", "readOnlyRootFilesystem")
    ),
    "port": PORT,
    "web.key": KEY,
    "web.scrape.tlsConfig": TLS,
    "web.scrape.basicAuth": BASIC,
}
"""Values that agent and cost service share."""


METAVARS: dict[str, Schema] = {
    "DURATION": text(r"([0-9]+([.][0-9]+)?|[.][0-9]+)(ms|s|m|h)"),
    "RATIO": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "DAYS": text("[0-9]{1,4}d"),
    "URL": text("https?://[^ ]+"),
    "LABEL": text("[a-zA-Z_][a-zA-Z0-9_]*"),
}
"""Schemas of options by the placeholder of the value in their help; other options accept any text."""


def of_kind(kind: OptionType) -> Schema:
    """Return the schema of a kind of option, including the types to which Helm's YAML parser converts the value."""
    if kind.is_list:
        return {"type": ["array", "string"], "items": TEXT | {"minLength": 1}, "minItems": 1, "minLength": 1}
    if kind is types.SWITCH:
        return {"enum": [True, False, "on", "off"]}
    if kind.words:
        return {"enum": [*kind.words, *(float(word) for word in kind.words if re.fullmatch(r"\d+\.\d+", word))]}
    if kind.metavar == "NUMBER" and kind.bounds:
        return {"type": "integer", "minimum": kind.bounds[0], "maximum": kind.bounds[1]}
    return METAVARS.get(kind.metavar, TEXT | {"minLength": 1})


def of_options(options: tuple[Option, ...]) -> Schema:
    """Return the schema of a file of options."""
    most = {key: {"maxItems": count} for key, count in MOST_KEYS.items()}
    return closed({one.key: of_kind(one.kind) | {"description": one.help} | most.get(one.key, {}) for one in options})


OF_OTHER_OBJECTS = (
    "agent.driver.runtimeClass.name",
    "agent.driver.cdi.runtimeClassName",
    "agent.priceBook.existingConfigMap",
    "agent.collectors.existingConfigMap",
    "agent.web.tlsSecret",
    "agent.web.existingSecret",
    "agent.priorityClassName",
    "service.prometheusSecret",
    "service.budgets.existingConfigMap",
    "service.store.storageClassName",
    "service.store.existingClaim",
    "service.web.tlsSecret",
    "service.web.existingSecret",
    "service.serviceAccountName",
    "service.priorityClassName",
    "serviceAccount.name",
    "monitoring.dashboards.namespace",
)
"""Values that are the name of another object or of a namespace."""

FRAGMENTS: dict[str, Schema] = {
    "platform": one_of(AUTO, "gpu-operator", "eks", "gke", "aks", "openshift", "k3s", "bare"),
    **{f"{part}.{key}": schema for part in ("agent", "service") for key, schema in POD.items()},
    **dict.fromkeys(OF_OTHER_OBJECTS, NAME_OR_NOTHING),
    "nameOverride": NAME_OF_OBJECTS,
    "fullnameOverride": NAME_OF_OBJECTS,
    "commonLabels": TEXT_MAP,
    "commonAnnotations": TEXT_MAP,
    "image.repository": text("[a-z0-9][a-z0-9._/-]*"),
    "image.registry": text("|[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._/-]*)?"),
    "image.tag": TAG,
    "image.digest": DIGEST,
    "image.pullPolicy": one_of("IfNotPresent", "Always", "Never"),
    "imagePullSecrets": each(closed({"name": TEXT}, "name")),
    "agent.config": of_options(OPTIONS),
    "agent.driver.mode": one_of(AUTO, "runtimeClass", "privileged", "cdi", "dra", "none"),
    "agent.driver.runtimeClass.deviceListMount": SWITCH_OR_AUTO,
    "agent.priorityQuotaPods": NUMBER_OR_AUTO,
    "agent.scc.create": SWITCH_OR_AUTO,
    "agent.driver.privileged.hostPath": FOLDER,
    "agent.driver.cdi.device": text("[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[A-Za-z0-9._:-]+"),
    "agent.driver.dra.apiVersion": one_of("resource.k8s.io/v1", "resource.k8s.io/v1beta2"),
    "agent.attribution.kubeletPath": FOLDER_BELOW,
    "agent.attribution.podLogsPath": FOLDER_OR_NOTHING,
    "agent.state.hostPath": FOLDER_OR_NOTHING,
    "agent.dcgm.library.hostPath": FOLDER_OR_NOTHING,
    "agent.dcgm.address": text(
        r"|embedded|(unix://)?/[^ /]+/[^ ]*[^ /]|(tcp://)?[A-Za-z0-9_.-]+(:[0-9]+)?|\[[0-9a-fA-F:.]+\](:[0-9]+)?"
    ),
    "agent.driver.dra.deviceClassName": text("[a-z0-9]([a-z0-9.-]*[a-z0-9])?"),
    "agent.priceBook.key": KEY,
    "agent.priceBook.content": BOOK,
    "agent.collectors.key": KEY,
    "agent.nodeAffinity.anyOf": EXPRESSIONS,
    "agent.nodeAffinity.allOf": EXPRESSIONS,
    "agent.updateStrategy.type": one_of("RollingUpdate", "OnDelete"),
    "agent.updateStrategy.rollingUpdate.maxUnavailable": MAXIMUM,
    "agent.updateStrategy.rollingUpdate.maxSurge": MAXIMUM,
    "agent.livenessProbe": PROBE,
    "agent.readinessProbe": PROBE,
    "agent.service.type": SERVICE_TYPE,
    "agent.service.port": PORT,
    "agent.service.internalTrafficPolicy": one_of("Cluster", "Local"),
    "agent.service.annotations": TEXT_MAP,
    "service.config": of_options(SERVE_OPTIONS),
    "service.image.tag": TAG,
    "service.image.digest": DIGEST,
    "service.budgets.content": each(ANY_MAP),
    "service.budgets.key": KEY,
    "service.store.type": one_of("pvc", "emptyDir", "none"),
    "service.store.size": text(f"[0-9]+([.][0-9]+)?{_SUFFIX}"),
    "service.type": SERVICE_TYPE,
    "service.annotations": TEXT_MAP,
    "serviceAccount.annotations": TEXT_MAP,
    "monitoring.labels": TEXT_MAP,
    "monitoring.podMonitor.enabled": SWITCH_OR_AUTO,
    "monitoring.rules.enabled": SWITCH_OR_AUTO,
    "monitoring.dashboards.enabled": SWITCH_OR_AUTO,
    "monitoring.scrape.job": KEY,
    "monitoring.scrape.serviceJob": KEY,
    "monitoring.scrape.interval": SPAN,
    "monitoring.scrape.timeout": SPAN,
    "monitoring.scrape.relabelings": RELABELINGS,
    "monitoring.scrape.metricRelabelings": RELABELINGS,
    "monitoring.dashboards.labels": TEXT_MAP,
    "monitoring.dashboards.annotations": TEXT_MAP,
    "networkPolicy.prometheus.namespaceSelector": SELECTOR,
    "networkPolicy.prometheus.podSelector": SELECTOR,
    "networkPolicy.prometheus.ports": each(PORT),
    "networkPolicy.dns.namespaceSelector": SELECTOR,
    "networkPolicy.dns.ports": each(PORT) | {"minItems": 1},
    "networkPolicy.apiServer.cidrs": each(CIDR),
    "networkPolicy.apiServer.ports": each(PORT) | {"minItems": 1},
    "networkPolicy.dcgm": PEERS,
    "networkPolicy.serviceFrom": PEERS,
    "networkPolicy.serviceTo": PEERS,
}
"""Schemas of values whose default does not determine them. A mapping in this table is one value, not a group."""

OF_PARENTS: Schema = {
    "global": ANY_MAP | {"description": "Values that a parent chart shares with its subcharts; not used."},
    "enabled": {
        "type": "boolean",
        "description": "For the condition of a parent chart; not used.",
    },
}


@dataclass(slots=True, kw_only=True)
class Value:
    """A value of values.yaml, or a group of them."""

    path: str
    about: str
    default: object
    line: int
    group: bool
    children: dict[str, "Value"] = field(default_factory=dict)


def read(path: Path) -> dict[str, Value]:
    """Return the values of a file in order.

    Raises:
        ValueError: A value has no comment, or an empty list or mapping has no schema.
    """
    source = path.read_text(encoding="utf-8")
    root = yaml.compose(source, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path.name}: not a mapping")  # noqa: TRY004 - a mistake in a file
    found = _children(root, "", source.splitlines(), yaml.safe_load(source))
    unknown = set(FRAGMENTS) - {value.path for value in leaves(found)}
    if unknown:
        raise ValueError(f"scripts/chart_schema.py: {sorted(unknown)} is not in {path.name}")
    return found


def _children(node: yaml.MappingNode, prefix: str, lines: list[str], defaults: dict[str, Any]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line
        path = f"{prefix}{key}"
        group = isinstance(value_node, yaml.MappingNode) and path not in FRAGMENTS
        about = _comment(lines, line)
        if not (about or group):
            raise ValueError(f"values.yaml:{line + 1}: {path} has no comment; add '# -- description'")
        value = Value(path=path, about=about, default=defaults[key], line=line + 1, group=group)
        if isinstance(value_node, yaml.MappingNode) and group:
            value.children = _children(value_node, f"{path}.", lines, defaults[key])
        values[key] = value
    return values


def _comment(lines: list[str], line: int) -> str:
    """Return the comment directly above a key, starting at `# --`."""
    above: list[str] = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        above.insert(0, lines[line].lstrip().removeprefix("#").strip())
        if above[0].startswith("-- "):
            return " ".join(above).removeprefix("-- ")
    return ""


def leaves(values: dict[str, Value]) -> Iterator[Value]:
    """Yield every value that is not a group, in order."""
    for value in values.values():
        if value.group:
            yield from leaves(value.children)
        else:
            yield value


def schema(values: dict[str, Value]) -> Schema:
    """Return the JSON schema of the file."""
    head: Schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of gpu-cost-exporter"}
    return head | _group(values, OF_PARENTS)


def _group(values: dict[str, Value], more: Schema | None = None) -> Schema:
    """Return the schema of a group. Helm removes a key with null, so a value that can be empty is not required."""
    needed = [key for key, value in values.items() if value.group or not _may_be_empty(value)]
    return closed({key: _of(value) for key, value in values.items()} | (more or {}), *needed)


def _may_be_empty(value: Value) -> bool:
    if isinstance(value.default, str):
        known = FRAGMENTS.get(value.path, {})
        return "enum" not in known and bool(re.search(known.get("pattern", ""), ""))
    return not isinstance(value.default, bool | int) and "minItems" not in FRAGMENTS.get(value.path, {})


def _of(value: Value) -> Schema:
    described: Schema = {"description": value.about} if value.about else {}
    if value.group:
        return described | _group(value.children)
    return described | (FRAGMENTS.get(value.path) or _of_default(value))


def _of_default(value: Value) -> Schema:
    for kind, name in ((bool, "boolean"), (int, "integer"), (str, "string")):
        if isinstance(value.default, kind):
            return {"type": name} | ({"minimum": 0} if name == "integer" else {})
    raise ValueError(f"values.yaml:{value.line}: {value.path}: has no schema; add it in scripts/chart_schema.py")
