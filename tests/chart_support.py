"""The chart as rendered by helm, the kustomize folders, and an evaluator of NetworkPolicies."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from importlib.metadata import distribution
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_support import answering
from files_support import LOADER, read_documents, read_yaml
from fleet_support import tool
from referencing import Registry, Resource

from gpu_simulator.stack import free_port

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "gpu-cost-exporter"
FIXTURES = ROOT / "tests" / "fixtures"
REGISTRY = FIXTURES / "chart-registry.yaml"
"""Values that every installation must have."""
PLATFORMS = ("gpu-operator", "eks", "gke", "aks", "openshift", "k3s", "bare")
SIMULATED = "agent: {config: {simulate: demo}}"
OPERATOR_API = "monitoring.coreos.com/v1"
SCHEMAS = ROOT / ".tools" / "schemas"
"""Schemas of custom resources."""
_VALIDATE = distribution("kubernetes-validate")
BUILT_IN_SCHEMAS = Path(str(_VALIDATE.locate_file("kubernetes_validate/kubernetes-json-schema")))
KUBERNETES_VERSIONS = ("1.27", "1.37")
"""The oldest and the newest version that the chart supports."""
COPIES = ("rules.yaml", "dashboards.yaml")
"""Templates that copy files of the repository."""
OPERATOR_KINDS = frozenset({"PodMonitor", "ServiceMonitor", "PrometheusRule"})

EVERYTHING = FIXTURES / "chart-everything.yaml"
"""Values that enable every switch, except those that exclude another."""
MODES: dict[str, tuple[tuple[Path, ...], str]] = {
    "privileged": ((), "agent: {driver: {mode: privileged}}"),
    "library-file": (
        (),
        "agent: {driver: {mode: privileged, privileged: {hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1}}}",
    ),
    "device-list": ((), "agent: {driver: {runtimeClass: {name: '', deviceListMount: true}}}"),
    "cdi": ((), "agent: {driver: {mode: cdi}}"),
    "dra": ((), "agent: {driver: {mode: dra}, metadata: {enabled: true}}"),
    "no-driver": ((), "agent: {driver: {mode: none}, processes: {enabled: false}}"),
    "not-root": ((), "agent: {attribution: {enabled: false}, state: {enabled: false}, processes: {enabled: false}}"),
    "engine-by-socket": ((), "agent: {dcgm: {address: 'unix:///run/dcgm/socket', library: {image: r.example/dcgm:4}}}"),
    "tls": ((), "agent: {web: {tlsSecret: gpu-agent-tls}}"),
    "client-certificates": (
        (),
        "agent: {web: {existingSecret: gpu-agent-web, tlsSecret: gpu-agent-tls, clientCertificate: true}}",
    ),
    "service-monitors": (
        (EVERYTHING,),
        "monitoring: {podMonitor: {enabled: false}, serviceMonitor: {enabled: true}}",
    ),
    "openshift-service": (
        (),
        (
            "platform: openshift\nservice: {enabled: true, config: {prometheus: http://p:9090}}\n"
            "networkPolicy: {enabled: true, apiServer: {cidrs: [10.0.0.1/32]}}"
        ),
    ),
    "service-alone": ((), "agent: {enabled: false}\nservice: {enabled: true, config: {prometheus: http://p:9090}}"),
}
"""Files and values of installations; each differs in one respect."""
PATIENCE_SECONDS = 60.0

Document = dict[str, Any]


def helm(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Return the output of helm."""
    done = subprocess.run(
        [program_of_helm(), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@lru_cache(maxsize=64)
def rendered(
    *files: Path,
    values: str = "",
    release: str = "gpu-cost",
    namespace: str = "gpu-cost",
    kube_version: str = "1.37.0",
    api: str = "",
) -> str:
    """Return every manifest of a release as text; ``values`` is YAML that overrides the files."""
    done = template(*files, values=values, release=release, namespace=namespace, kube_version=kube_version, api=api)
    return done.stdout


def template(
    *files: Path,
    values: str = "",
    release: str = "gpu-cost",
    namespace: str = "gpu-cost",
    kube_version: str = "1.37.0",
    api: str = "",
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Render with helm, for a cluster that also has the kinds of ``api``; with ``check=False`` helm may refuse."""
    chosen = [word for path in (REGISTRY, *files) for word in ("--values", str(path))]
    chosen += ["--api-versions", api] if api else []
    command = [program_of_helm(), "template", release, str(CHART), "--namespace", namespace]
    command += ["--kube-version", kube_version, *chosen, "--values", "-"]
    done = subprocess.run(
        command, input=values or "{}", capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def program_of_helm() -> str:
    """Return the pinned helm of the virtual environment, or one on the PATH."""
    pinned = Path(sys.executable).with_name("helm")
    return str(pinned) if pinned.exists() else tool("helm")


def documents(*files: Path, values: str = "", release: str = "gpu-cost", namespace: str = "gpu-cost") -> list[Document]:
    """Return every manifest of a release except rules and dashboards, which take a second to read."""
    return read(without_copies(rendered(*files, values=values, release=release, namespace=namespace)))


def read(text: str) -> list[Document]:
    """Return the manifests in a text."""
    return [document for document in read_documents(text) if document]


def without_copies(text: str) -> str:
    """Return the manifests without rules and dashboards, which are the repository's."""
    parts = re.split(r"(?m)^---\n", text)
    return "---\n".join(part for part in parts if not any(f"/{name}" in part.partition("\n")[0] for name in COPIES))


def of_kind(found: Iterable[Document], kind: str, component: str = "") -> Document:
    """Return the only manifest of a kind, or of a kind with a name or label of the component."""
    (chosen,) = all_of_kind(found, kind, component)
    return chosen


def all_of_kind(found: Iterable[Document], kind: str, component: str = "") -> list[Document]:
    """Return all manifests of a kind; ``component`` is part of their name."""
    return [one for one in found if one["kind"] == kind and component in one["metadata"]["name"]]


class _StrictLoader(LOADER):
    """Refuses a duplicate key of a mapping, as the API server does with strict validation."""

    def construct_mapping(self, node: yaml.MappingNode, *, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if len(keys) > len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"a key appears twice: {keys}", node.start_mark)
        return dict(super().construct_mapping(node, deep=deep))


def manifest_problems(version: str, path: Path) -> list[str]:
    """Return the strict errors of manifests, by the schemas of a version of Kubernetes and of custom resources."""
    return [found for document in _strictly_read(path) for found in _problems(version, document) or ()]


def without_schema(version: str, path: Path) -> set[str]:
    """Return the kinds in a file of manifests that have no schema; all else in it is strictly valid."""
    assert manifest_problems(version, path) == []
    return {document["kind"] for document in _strictly_read(path) if _problems(version, document) is None}


def _strictly_read(path: Path) -> list[Document]:
    if not SCHEMAS.is_dir():
        pytest.skip("needs the schemas of .tools/schemas: make install")
    return [document for document in yaml.load_all(path.read_text(encoding="utf-8"), _StrictLoader) if document]


def _problems(version: str, document: Document) -> list[str] | None:
    """Return the errors of a manifest; ``None`` without a schema for its kind."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - takes a second, in each process that collects tests

    group, _, api_version = document["apiVersion"].rpartition("/")
    name = "-".join(word for word in (document["kind"].lower(), group.partition(".")[0], api_version) if word)
    folder = BUILT_IN_SCHEMAS / f"v{version}.0-local-strict"
    path = next((one for one in (folder / f"{name}.json", SCHEMAS / f"{name}.json") if one.is_file()), None)
    if path is None:
        return None
    what = f"{document['kind']} {document['metadata']['name']}"
    check = Draft202012Validator(json.loads(path.read_text(encoding="utf-8")), registry=_definitions(folder))
    return [f"{what}: {error.json_path}: {error.message}" for error in check.iter_errors(document)]


@lru_cache
def _definitions(folder: Path) -> Registry[Any]:
    """Return the definitions that the schemas of a version of Kubernetes refer to."""
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text(encoding="utf-8")))
    return definitions @ Registry()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a rendered container, with its mounts as folders of this machine."""

    args: list[str]
    env: dict[str, str]
    folders: dict[str, Path] = field(default_factory=dict)
    """Folders by mount path."""


def started(
    workload: Document,
    found: Iterable[Document],
    folder: Path,
    secrets: Mapping[str, Mapping[str, bytes]] | None = None,
) -> Start:
    """Create the files that the only container of a workload sees.

    Args:
        workload: A DaemonSet or a Deployment.
        found: The release, for its ConfigMaps and Secrets.
        folder: Folder in which the mounts are made.
        secrets: Contents of existing Secrets and ConfigMaps, by name and key.
    """
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    contents = {**(secrets or {}), **_contents(found)}
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    folders: dict[str, Path] = {}
    for number, mount in enumerate(container.get("volumeMounts", [])):
        assert "subPath" not in mount, f"{mount}: a subPath is never updated"
        folders[mount["mountPath"]] = folder / f"mount-{number}"
        _fill(folders[mount["mountPath"]], volumes[mount["name"]], contents)
    for made in folders.values():
        for path in made.glob("*"):
            if path.is_file():
                path.write_bytes(_moved(path.read_text(encoding="utf-8"), folders).encode())
    env = {entry["name"]: _moved(entry["value"], folders) for entry in container.get("env", []) if entry.get("value")}
    return Start(args=[_moved(word, folders) for word in container.get("args", [])], env=env, folders=folders)


def _contents(found: Iterable[Document]) -> dict[str, dict[str, bytes]]:
    texts: dict[str, dict[str, bytes]] = {}
    for document in found:
        if document["kind"] in {"ConfigMap", "Secret"}:
            data = {key: text.encode() for key, text in (document.get("data") or {}).items()}
            if document["kind"] == "Secret":
                data = {key: base64.b64decode(text) for key, text in data.items()}
            data |= {key: text.encode() for key, text in (document.get("stringData") or {}).items()}
            texts[document["metadata"]["name"]] = data
    return texts


def _fill(place: Path, volume: Document, contents: Mapping[str, Mapping[str, bytes]]) -> None:
    place.mkdir(parents=True)
    parts = volume.get("projected", {}).get("sources", [volume])
    for part in parts:
        for kind, named in (("configMap", "name"), ("secret", "secretName"), ("secret", "name")):
            source = part.get(kind) or {}
            if named in source and (source[named] in contents or not source.get("optional")):
                keys = {item["key"]: item["path"] for item in source.get("items", [])}
                for key, text in contents[source[named]].items():
                    if not keys or key in keys:
                        (place / keys.get(key, key)).write_bytes(text)


def _moved(text: str, folders: Mapping[str, Path]) -> str:
    longest_first = sorted(folders, key=len, reverse=True)
    mounted = "|".join(re.escape(place) for place in longest_first) or "(?!)"
    return re.sub(rf"(?<![\w.])(?:{mounted})(?![\w.-])", lambda found: str(folders[found[0]]), text)


def scrape_config(
    endpoint: Document,
    job: str,
    target: str,
    labels: Mapping[str, str],
    folder: Path,
    secrets: Mapping[str, Mapping[str, bytes]] | None = None,
) -> Document:
    """Return the scrape configuration of the Prometheus operator for a monitor's endpoint, with one known target.

    Args:
        endpoint: Endpoint of a PodMonitor or a ServiceMonitor.
        job: Name of the job.
        target: ``127.0.0.1:9400``.
        labels: Labels from discovery; ``__meta_...`` for relabelling.
        folder: Folder for certificates and passwords.
        secrets: Contents of the Secrets that the endpoint names.
    """
    config: Document = {
        "job_name": job,
        "honor_labels": endpoint.get("honorLabels", False),
        "metrics_path": endpoint.get("path", "/metrics"),
        "scheme": endpoint.get("scheme", "http"),
        "static_configs": [{"targets": [target], "labels": dict(labels)}],
        "relabel_configs": [_snake(rule) for rule in endpoint.get("relabelings", [])],
        "metric_relabel_configs": [_snake(rule) for rule in endpoint.get("metricRelabelings", [])],
    }
    if tls := endpoint.get("tlsConfig"):
        config["tls_config"] = _tls(tls, folder, secrets or {})
    if basic := endpoint.get("basicAuth"):
        user, password = (_secret(basic[key], secrets or {}).decode() for key in ("username", "password"))
        config["basic_auth"] = {"username": user, "password": password}
    return config


def _tls(tls: Document, folder: Path, secrets: Mapping[str, Mapping[str, bytes]]) -> Document:
    made: Document = {}
    places = {"ca_file": tls.get("ca"), "cert_file": tls.get("cert"), "key_file": {"secret": tls.get("keySecret")}}
    for key, source in places.items():
        chosen = source and (source.get("secret") or source.get("configMap"))
        if chosen:
            path = folder / f"scrape-{key}"
            path.write_bytes(_secret(chosen, secrets))
            made[key] = str(path)
    if "serverName" in tls:
        made["server_name"] = tls["serverName"]
    if tls.get("insecureSkipVerify"):
        made["insecure_skip_verify"] = True
    return made


def _secret(reference: Document, secrets: Mapping[str, Mapping[str, bytes]]) -> bytes:
    return secrets[reference["name"]][reference["key"]]


def _snake(rule: Document) -> Document:
    return {"".join(f"_{c.lower()}" if c.isupper() else c for c in key): value for key, value in rule.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraper:
    """A real Prometheus with given scrape configurations."""

    port: int
    log: Path

    def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """Run an instant query; return values by label set."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        body = urllib.parse.urlencode({"query": expression}).encode()
        with urllib.request.urlopen(url, data=body, timeout=10) as answer:
            rows = json.load(answer)["data"]["result"]
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in rows}

    def until(self, expression: str, count: int = 1) -> dict[frozenset[tuple[str, str]], float]:
        """Return the first answer with the given number of rows."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if len(found := self.query(expression)) >= count:
                    return found
            except OSError:
                pass
            time.sleep(0.1)
        said = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise AssertionError(f"no answer to {expression} within {PATIENCE_SECONDS} s: {said}")


@contextmanager
def page_server(text: Callable[[], str]) -> Iterator[str]:
    """Serve a page of metrics, made again for each request; yield its address."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

    with answering(Page) as address:
        yield address


@contextmanager
def scraping(folder: Path, configs: Iterable[Document], rules: Iterable[Path] = ()) -> Iterator[Scraper]:
    """Start a Prometheus with these scrape configurations and files of rules; it ends with the block."""
    port = free_port(0)
    file = folder / "prometheus.yml"
    whole = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": list(configs),
        "rule_files": [str(path) for path in rules],
    }
    file.write_text(yaml.safe_dump(whole), encoding="utf-8")
    command = [tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output)
    try:
        yield Scraper(port=port, log=log)
    finally:
        process.kill()
        process.wait()


KUSTOMIZE = ROOT / "deploy" / "kustomize"
BASE = KUSTOMIZE / "base"
OVERLAYS = sorted(path.parent for path in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in (KUSTOMIZE / "components").glob("*/kustomization.yaml"))
FOLDERS = [BASE, *OVERLAYS]


@lru_cache(maxsize=64)
def text_of(folder: Path) -> str:
    """Return the build of a folder as text."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("needs kubectl or kustomize on the PATH")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a warning, such as for a deprecated field"
    return done.stdout


@lru_cache(maxsize=64)
def built(folder: Path) -> list[Document]:
    """Return the documents of a folder; read-only."""
    return read(text_of(folder))


def overlay(name: str) -> list[Document]:
    """Return the documents of an overlay, or of the base."""
    return built(BASE if name == "base" else KUSTOMIZE / "overlays" / name)


def composed(folder: Path, components: Iterable[str], resource: Path = BASE, **more: object) -> list[Document]:
    """Return the documents of a user's kustomization.

    Args:
        folder: Empty folder for the kustomization.
        components: Names below ``components``.
        resource: Its resource.
        more: Further keys of it.
    """
    folder.mkdir(exist_ok=True)
    whole = {
        "resources": [_relative(resource, folder)],
        "components": [_relative(KUSTOMIZE / "components" / name, folder) for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    return built(folder)


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder.resolve())


def pod_spec(workload: Document) -> Document:
    """Return the spec of a workload's pods."""
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def options(container: Document) -> dict[str, object]:
    """Return the options that its environment sets, by their keys in a configuration file."""
    prefix = "GPU_COST_EXPORTER_"
    return {
        entry["name"].removeprefix(prefix).lower().replace("_", "-"): read_yaml(entry["value"])
        if entry["value"] in {"on", "off"}
        else entry["value"]
        for entry in container.get("env", [])
        if entry["name"].startswith(prefix) and entry["name"] != f"{prefix}CONFIG"
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One end of a connection: a pod, or with an empty namespace an address outside of the cluster's pods."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.9.9.9"
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of a pod, by name."""

    @property
    def namespace_labels(self) -> dict[str, str]:
        """Return the labels that Kubernetes sets on a namespace."""
        return {"kubernetes.io/metadata.name": self.namespace}


def pod_of(workload: Document) -> Peer:
    """Return a pod of a DaemonSet or a Deployment."""
    template = workload["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for one in template["spec"]["containers"] for port in one["ports"]}
    return Peer(namespace=workload["metadata"]["namespace"], labels=template["metadata"]["labels"], ports=ports)


def isolated(policies: Iterable[Document], pod: Peer) -> set[str]:
    """Return the directions in which only listed peers are allowed: Ingress, Egress."""
    return {direction for policy in _of(policies, pod) for direction in policy["spec"]["policyTypes"]}


def connects(policies: Iterable[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return whether policies allow a connection out of its source and in to its target."""
    every = list(policies)
    return _passes(every, "Egress", source, target, target, port, protocol) and _passes(
        every, "Ingress", target, source, target, port, protocol
    )


def _passes(
    policies: list[Document], direction: str, pod: Peer, other: Peer, target: Peer, port: int, protocol: str
) -> bool:
    if direction not in isolated(policies, pod):
        return True
    return any(
        _ports(rule, target, port, protocol) and _peers(rule, direction, policy, other)
        for policy in _of(policies, pod)
        if direction in policy["spec"]["policyTypes"]
        for rule in policy["spec"].get(direction.lower(), ())
    )


def _of(policies: Iterable[Document], pod: Peer) -> Iterator[Document]:
    for policy in policies:
        here = pod.namespace == policy["metadata"]["namespace"]
        if here and _matches(policy["spec"]["podSelector"], pod.labels):
            yield policy


def _ports(rule: Document, target: Peer, port: int, protocol: str) -> bool:
    """Return whether a rule names the port; a named port is the target's."""
    if not rule.get("ports"):
        return True
    return any(
        one.get("protocol", "TCP") == protocol and target.ports.get(one.get("port"), one.get("port", port)) == port
        for one in rule["ports"]
    )


def _peers(rule: Document, direction: str, policy: Document, other: Peer) -> bool:
    named = rule.get("from" if direction == "Ingress" else "to")
    return not named or any(_peer(one, policy, other) for one in named)


def _peer(named: Document, policy: Document, other: Peer) -> bool:
    if block := named.get("ipBlock"):
        address = ip_address(other.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(left_out) for left_out in block.get("except", ())
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in named:
        here = _matches(named["namespaceSelector"], other.namespace_labels)
    else:
        here = other.namespace == policy["metadata"]["namespace"]
    return here and _matches(named.get("podSelector", {}), other.labels)


def _matches(selector: Document, labels: Mapping[str, str]) -> bool:
    """Return whether labels match; an empty selector matches everything."""
    known = {"matchLabels", "matchExpressions"}
    assert selector.keys() <= known, f"{selector}: this evaluator supports {known} only"
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _expression(one, labels) for one in selector.get("matchExpressions", ())
    )


def _expression(one: Document, labels: Mapping[str, str]) -> bool:
    value = labels.get(one["key"])
    match one["operator"]:
        case "In":
            return value in one["values"]
        case "NotIn":
            return value not in one["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case unknown:
            raise AssertionError(f"operator {unknown}")
