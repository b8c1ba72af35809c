"""The chart refuses every likely wrong value, with a message that names the key."""

import pytest
from chart_support import documents, template

# A user's values, and the required parts of the message: the key, and, where useful, the allowed values.
WRONG: dict[str, tuple[str, tuple[str, ...]]] = {
    "a key in the wrong case": ("agent: {hostPid: true}", ("agent", "hostPid")),
    "a top-level key of another chart": ("serviceMonitor: {enabled: true}", ("serviceMonitor",)),
    "dcgm-exporter's arguments": ("arguments: ['-c', '1000']", ("arguments",)),
    "a misspelt key deep down": ("monitoring: {podMonitor: {enable: true}}", ("podMonitor", "enable")),
    "a misspelt option of the agent": (
        "agent: {config: {sample-intervall: 1s}}",
        ("agent", "config", "sample-intervall"),
    ),
    "an option of the agent in camel case": ("agent: {config: {sampleInterval: 1s}}", ("config", "sampleInterval")),
    "an option of the other command": ("agent: {config: {prometheus: 'http://p'}}", ("agent", "config", "prometheus")),
    "a misspelt option of the service": (
        "service: {enabled: true, config: {prometheus: 'http://p', histroy: 90d}}",
        ("service", "config", "histroy"),
    ),
    "a duration without its unit": ("agent: {config: {sample-interval: 5}}", ("sample-interval",)),
    "a duration in words": ("agent: {config: {linger: 5 minutes}}", ("linger",)),
    "a duration out of range": ("agent: {config: {sample-interval: 10ms}}", ("sample-interval",)),
    "an enum's near miss": ("agent: {config: {source: nvmll}}", ("source", "nvml")),
    "a yes where on and off are meant": ("agent: {config: {dcgm-pod-uid: maybe}}", ("dcgm-pod-uid",)),
    "a threshold in percent": ("agent: {config: {idle-threshold: 5}}", ("idle-threshold",)),
    "a negative number": ("agent: {config: {series-limit: -1}}", ("series-limit",)),
    "an option that a value of the chart sets": (
        "agent: {config: {kube-metadata: 'on'}}",
        ("agent.config", "kube-metadata", "agent.metadata.enabled"),
    ),
    "the port among the options": ("agent: {config: {listen: ':9500'}}", ("agent.config", "listen", "agent.port")),
    "a nested map where a value belongs": ("agent: {config: {linger: {value: 5m}}}", ("linger",)),
    "a port as text": ("agent: {port: '9400'}", ("agent", "port")),
    "a port that is none": ("agent: {port: 94000}", ("agent", "port")),
    "a switch as text": ("agent: {metadata: {enabled: 'yes'}}", ("metadata", "enabled")),
    "a way to the driver that there is not": ("agent: {driver: {mode: hostPath}}", ("driver", "mode", "privileged")),
    "the runtime class where it used to be": ("agent: {runtimeClassName: nvidia}", ("agent", "runtimeClassName")),
    "a digest that is a tag": ("image: {digest: v0.1.0}", ("image", "digest")),
    "a digest without its algorithm": ("image: {digest: " + "a" * 64 + "}", ("image", "digest")),
    "a tag that is a digest": ("image: {tag: 'sha256:" + "a" * 64 + "'}", ("image", "tag")),
    "a tag that is a number": ("image: {tag: 1.2}", ("image", "tag")),
    "a tag in the repository": ("image: {repository: 'gpu-cost-exporter:0.1.0'}", ("image", "repository")),
    "a pull policy in lower case": ("image: {pullPolicy: always}", ("image", "pullPolicy", "Always")),
    "secrets as names": ("imagePullSecrets: [mirror]", ("imagePullSecrets",)),
    "a folder that is relative": ("agent: {state: {hostPath: var/lib/x}}", ("state", "hostPath")),
    "the socket where its folder belongs": (
        "agent: {attribution: {kubeletPath: /var/lib/kubelet/pod-resources/kubelet.sock}}",
        ("kubeletPath",),
    ),
    "tolerations as a map": ("agent: {tolerations: {key: a}}", ("agent", "tolerations")),
    "an operator of tolerations that there is not": (
        "agent: {tolerations: [{key: a, operator: In}]}",
        ("tolerations", "operator"),
    ),
    "unavailable pods that are no number": (
        "agent: {updateStrategy: {rollingUpdate: {maxUnavailable: ten}}}",
        ("maxUnavailable",),
    ),
    "a negative surge": ("agent: {updateStrategy: {rollingUpdate: {maxSurge: -1}}}", ("maxSurge",)),
    "none unavailable, which never ends": (
        "agent: {updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}",
        ("agent.updateStrategy.rollingUpdate",),
    ),
    "a surge and unavailable nodes": (
        "agent: {updateStrategy: {rollingUpdate: {maxSurge: 1}}}",
        ("agent.updateStrategy.rollingUpdate",),
    ),
    "a surge of agents that share a port": (
        "agent: {hostNetwork: true, updateStrategy: {rollingUpdate: {maxUnavailable: 0%, maxSurge: 1}}}",
        ("agent.updateStrategy.rollingUpdate.maxSurge", "agent.hostNetwork"),
    ),
    "a scrape interval without its unit": ("monitoring: {scrape: {interval: 15}}", ("scrape", "interval")),
    "a scrape that takes longer than its interval": (
        "monitoring: {podMonitor: {enabled: true}, scrape: {interval: 10s, timeout: 30s}}",
        ("monitoring.scrape.timeout",),
    ),
    "two monitors of the same pods": (
        "monitoring: {podMonitor: {enabled: true}, serviceMonitor: {enabled: true}}",
        ("monitoring.podMonitor", "monitoring.serviceMonitor"),
    ),
    "a service without Prometheus": ("service: {enabled: true}", ("service.config", "prometheus")),
    "Prometheus without its scheme": (
        "service: {enabled: true, config: {prometheus: 'prometheus:9090'}}",
        ("service", "prometheus"),
    ),
    "a password in the address of Prometheus": (
        "service: {enabled: true, config: {prometheus: 'http://me:secret@p:9090'}}",
        ("service.config.prometheus", "prometheus-password-file"),
    ),
    "a password in the address of Prometheus among the arguments": (
        "service: {enabled: true, extraArgs: ['--prometheus=http://me:secret@p:9090']}",
        ("service.extraArgs", "prometheus-password-file"),
    ),
    "a token among the headers": (
        (
            "service: {enabled: true, config: {prometheus: 'https://p', "
            "prometheus-headers: [X-Scope-OrgID=a, 'authorization=Bearer secret@']}}"
        ),
        ("service.config.prometheus-headers", "prometheus-token-file"),
    ),
    "an answer of the kubelet that holds for less than two questions": (
        "agent: {config: {kubelet-interval: 1m}}",
        ("agent.config.attribution-expiry", "agent.config.kubelet-interval"),
    ),
    "a store that there is not": ("service: {store: {type: pv}}", ("store", "type", "emptyDir")),
    "a size without its unit": ("service: {store: {size: 5}}", ("store", "size")),
    "two replicas of the service": ("service: {replicas: 2}", ("service", "replicas")),
    "TLS that its own monitor cannot speak": (
        "agent: {web: {tlsSecret: t}}\nmonitoring: {podMonitor: {enabled: true}}",
        ("agent.web.scrape.tlsConfig",),
    ),
    "a password that its own monitor does not have": (
        "agent: {web: {existingSecret: w, basicAuth: true}}\nmonitoring: {podMonitor: {enabled: true}}",
        ("agent.web.scrape.basicAuth",),
    ),
    "TLS of the cost service that its own monitor cannot speak": (
        (
            "service: {enabled: true, config: {prometheus: 'http://p:9090'}, web: {tlsSecret: t}}\n"
            "monitoring: {podMonitor: {enabled: true}}"
        ),
        ("service.web.scrape.tlsConfig",),
    ),
    "client certificates of which its own monitor has none": (
        (
            "agent: {web: {tlsSecret: t, existingSecret: w, clientCertificate: true, scrape: {tlsConfig: {ca: {}}}}}"
            "\nmonitoring: {podMonitor: {enabled: true}}"
        ),
        ("agent.web.scrape.tlsConfig", "agent.web.clientCertificate"),
    ),
    "users without a web configuration": ("agent: {web: {basicAuth: true}}", ("agent.web.existingSecret",)),
    "two price books": (
        "agent: {priceBook: {content: {rows: []}, existingConfigMap: prices}}",
        ("agent.priceBook",),
    ),
    "two collectors files": (
        "agent: {collectors: {content: 'x', existingConfigMap: metrics}}",
        ("agent.collectors",),
    ),
    "two libraries of DCGM": (
        "agent: {dcgm: {address: 'a:5555', library: {hostPath: /x, image: y}}}",
        ("agent.dcgm.library",),
    ),
    "an engine's address with a scheme": ("agent: {dcgm: {address: 'http://dcgm:5555'}}", ("dcgm", "address")),
    "an engine's folder where its socket belongs": (
        "agent: {dcgm: {address: 'unix:///run/nv-hostengine/'}}",
        ("dcgm", "address"),
    ),
    "an engine's socket in the root of the node": ("agent: {dcgm: {address: /dcgm.sock}}", ("dcgm", "address")),
    "a network policy that shuts off the API server": (
        "agent: {metadata: {enabled: true}}\nnetworkPolicy: {enabled: true}",
        ("networkPolicy.apiServer.cidrs",),
    ),
    "a network policy that lets an agent out to any engine": (
        (
            "agent: {metadata: {enabled: false}, dcgm: {address: 'nvidia-dcgm.gpu-operator:5555'}}\n"
            "networkPolicy: {enabled: true}"
        ),
        ("networkPolicy.dcgm", "app: nvidia-dcgm"),
    ),
    "rights for the account of every pod in the namespace": (
        "agent: {metadata: {enabled: true}}\nserviceAccount: {create: false}",
        ("serviceAccount.name", "serviceAccount.create"),
    ),
    "host paths for the account of every pod in the namespace": (
        "agent: {scc: {create: true}}\nserviceAccount: {create: false, name: default}",
        ("serviceAccount.name", "agent.scc.create"),
    ),
    "no port for names, which Kubernetes reads as all": ("networkPolicy: {dns: {ports: []}}", ("dns", "ports")),
    "no port of the API server": ("networkPolicy: {apiServer: {ports: null}}", ("apiServer", "ports")),
    "an address that is no network": (
        "networkPolicy: {enabled: true, apiServer: {cidrs: [10.0.0.1]}}",
        ("cidrs",),
    ),
    "no registry": (
        "image: {registry: ''}",
        ("image.registry", "--set image.registry=registry.example.org", "docker.io/library"),
    ),
    "a platform that there is not": ("platform: gcp", ("platform", "gpu-operator", "gke")),
    "a switch that is neither on, off nor auto": ("agent: {scc: {create: maybe}}", ("scc", "create")),
    "nothing to install": ("agent: {enabled: false}", ("agent.enabled", "service.enabled")),
    "a CDI device that is a path": ("agent: {driver: {mode: cdi, cdi: {device: /dev/nvidia0}}}", ("cdi", "device")),
    "DRA in the version of a Kubernetes that is gone": (
        "agent: {driver: {mode: dra, dra: {apiVersion: resource.k8s.io/v1alpha3}}}",
        ("dra", "apiVersion"),
    ),
    "a label's value that is a number": ("agent: {podLabels: {cost: 5}}", ("podLabels", "cost")),
    "an environment variable that is a number": ("agent: {extraEnv: [{name: A, value: 1}]}", ("extraEnv",)),
    "memory that is a number in words": ("agent: {resources: {limits: {memory: 256MB}}}", ("memory",)),
    "a name that Kubernetes does not take": ("fullnameOverride: GPU_Cost", ("fullnameOverride",)),
    "memory in a unit that looks like one": ("agent: {resources: {limits: {memory: 4096ki}}}", ("memory",)),
    "the whole node as the state's folder": ("agent: {state: {hostPath: /}}", ("state", "hostPath")),
    "a relabeling in Prometheus' own words": (
        "monitoring: {scrape: {relabelings: [{source_labels: [a], target_label: b}]}}",
        ("monitoring", "relabelings", "source_labels"),
    ),
    "a pod's key in the container's security context": (
        "agent: {securityContext: {fsGroup: 1}}",
        ("agent", "securityContext", "fsGroup"),
    ),
    "a misspelt key of a security context": (
        "service: {podSecurityContext: {runAsNonroot: true}}",
        ("service", "podSecurityContext", "runAsNonroot"),
    ),
    "a peer that is no network": ("networkPolicy: {dcgm: [{ipBlock: {cidrs: [10.0.0.0/8]}}]}", ("ipBlock", "cidrs")),
    "a name that Services do not take": ("fullnameOverride: 1st", ("fullnameOverride",)),
    "a runtime class in capitals": ("agent: {driver: {runtimeClass: {name: NVIDIA}}}", ("runtimeClass", "name")),
    "a dash where other charts mean no storage class": (
        "service: {store: {storageClassName: '-'}}",
        ("store", "storageClassName"),
    ),
    "a Secret by its namespace and name": ("agent: {web: {tlsSecret: gpu/tls}}", ("web", "tlsSecret")),
    "a priority class in braces": ("agent: {priorityClassName: '{{ .class }}'}", ("agent", "priorityClassName")),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_value_is_refused_with_the_name_of_its_key(what: str) -> None:
    values, names = WRONG[what]
    refused = template(values=values, check=False)
    assert refused.returncode != 0, f"rendered: {values}"
    for name in names:
        assert name in refused.stderr, refused.stderr
    assert "nil pointer" not in refused.stderr
    assert "secret@" not in refused.stderr


def test_all_schema_errors_are_reported_at_once() -> None:
    values = "agent: {port: '9400', driver: {mode: x}, config: {linger: 5}}\nimage: {digest: y}"
    refused = template(values=values, check=False).stderr
    for name in ("port", "mode", "linger", "digest"):
        assert name in refused


RIGHT = {
    "numbers and switches that YAML makes of what people write": (
        "agent: {config: {attribution-expiry: 90s, dcgm-names: 4.9, idle-threshold: 0.1, series-limit: 5000}}"
    ),
    "switches as YAML's and as words": "agent: {config: {dcgm-pod-uid: on, dcgm-old-labels: 'off'}}",
    "lists as lists and as words": "agent: {config: {pod-labels: [team, app], team-keys: 'team,owner'}}",
    "a number of unavailable pods": "agent: {updateStrategy: {rollingUpdate: {maxUnavailable: 3}}}",
    "resources of all kinds": "agent: {resources: {requests: {cpu: 0.1, memory: 1e8}, limits: {memory: 1Gi}}}",
    "no resources": (
        "agent: {resources: null}\nservice: {enabled: true, config: {prometheus: 'http://p'}, resources: null}"
    ),
    "no resources but a claim": (
        "agent: {metadata: {enabled: true}, driver: {mode: dra}, resources: {requests: null, limits: null}}"
    ),
    "kibibytes": "agent: {resources: {limits: {ephemeral-storage: 4096Ki}}}",
    "a relabeling as the Prometheus operator has it": (
        "monitoring: {scrape: {relabelings: [{sourceLabels: [a], targetLabel: b, regex: '(.*)', action: replace}]}}"
    ),
    "an account that has no rights": "agent: {metadata: {enabled: false}}\nserviceAccount: {create: false}",
    "another platform": "platform: gke",
    "an account whose rights are given elsewhere": (
        "agent: {metadata: {enabled: true}}\nrbac: {create: false}\nserviceAccount: {create: false}"
    ),
    "a tenant among the headers": (
        "service: {enabled: true, config: {prometheus: 'https://p', prometheus-headers: 'X-Scope-OrgID=authorization'}}"
    ),
    "an engine's socket": "agent: {dcgm: {address: 'unix:///run/nv-hostengine/socket'}}",
}


@pytest.mark.parametrize("what", RIGHT)
def test_valid_value_is_accepted(what: str) -> None:
    assert documents(values=RIGHT[what])
