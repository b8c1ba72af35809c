"""Settles the agent's configuration: flags, environment, dcgm-exporter's of both, file, defaults, in this order."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exporter.attribution import exported_labels
from exporter.config import dcgm_settings, engine_address, hostname_label, paths
from exporter.config.agent_config import AgentConfig
from exporter.config.dcgm_flags import Given
from exporter.config.options import BY_KEY, OPTIONS
from exporter.config.settle import refusal, settle, unknown_variables
from exporter.errors import ConfigError

EXPORTED_KEYS = ("pod-labels", "pod-annotations")
MOST_KEYS = {**dict.fromkeys(EXPORTED_KEYS, 10), "cost-labels": 8}
"""Of lists of keys: how many they may name."""
_Values = dict[str, Any]  # by option key; each value was made by its option's kind


def load_agent(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    dcgm_flags: Sequence[Given] = (),
    check_paths: bool = True,
    extra: tuple[str, ...] = (),
) -> AgentConfig:
    """The agent's settled configuration.

    Args:
        flags: Option key, with hyphens or underscores, to its text; ``None`` is not given. ``config`` is the file.
        environ: The process environment.
        dcgm_flags: Flags of dcgm-exporter; they win over its variables, and ours over both.
        check_paths: Also look at what the values name: collectors file, state directory, sockets.
        extra: Problems that the caller met before, told together with those met here.

    Raises:
        ConfigError: With all mistakes at once, one line each.
    """
    problems = list(extra)
    from_dcgm = dcgm_settings.translate(environ, dcgm_flags, _stated(flags, environ))
    settled = settle(OPTIONS, flags, environ, problems, from_dcgm.values)
    values, stated = settled.values, settled.stated
    if values["simulate"] and values["workload-manager"] == "kubernetes" and "kube-metadata" not in stated:
        values["kube-metadata"] = True  # a simulated node has an API server, and nobody's rights are in the way
    if values["workload-manager"] != "kubernetes" and "kube-metadata" in from_dcgm.values:
        values["kube-metadata"] = False  # it asks for what it would do with pods, of which there are none
    if values["simulate"] and "lock-dir" not in stated:
        values["lock-dir"] = None  # many simulated nodes of one name may run on one machine
    _add_resources(values, from_dcgm.resources, problems)
    _check_together(values, problems)
    warnings = [*from_dcgm.warnings, *_settle_collectors(values), *_settle_source(values)]
    warnings += unknown_variables(OPTIONS, environ) + _without_effect(values)
    if check_paths:
        problems += paths.problems(values)
    if problems:
        raise ConfigError(*problems)
    return _build(values, tuple(warnings))


def _stated(flags: Mapping[str, object], environ: Mapping[str, str]) -> frozenset[str]:
    given = {key.replace("_", "-") for key, value in flags.items() if value is not None}
    return frozenset(option.key for option in OPTIONS if option.key in given or environ.get(option.env))


def _add_resources(values: _Values, resources: Sequence[tuple[str, str]], problems: list[str]) -> None:
    option = BY_KEY["gpu-resources"]
    for origin, text in resources:
        names = text.strip(", ")
        if not names or values["gpu-resources"] is None:
            continue
        try:
            added = [option.kind.parse(name) for name in names.split(",")]
        except ValueError as error:
            problems.append(refusal(option, origin, str(error)))
            continue
        values["gpu-resources"] = tuple(dict.fromkeys((*values["gpu-resources"], *added)))


def _settle_collectors(values: _Values) -> list[str]:
    """A file that only dcgm-exporter's image has stands for the default set."""
    warning = dcgm_settings.image_file_warning(values["collectors"]) if values["collectors"] else ""
    if not warning:
        return []
    values["collectors"] = None
    return [warning]


def _settle_source(values: _Values) -> list[str]:
    """Whether DCGM is used at all is whether there is an address; what was given in vain is told."""
    if values["source"] == "dcgm":
        values["dcgm-address"] = values["dcgm-address"] or engine_address.DEFAULT_ADDRESS
    elif values["source"] == "nvml" and values["dcgm-address"]:
        values["dcgm-address"] = None
        return ["dcgm-address: with source nvml no engine is asked; not used; source auto reads both"]
    return []


def _check_together(values: _Values, problems: list[str]) -> None:
    expiry, interval = values["attribution-expiry"], values["kubelet-interval"]
    if expiry is not None and interval is not None and expiry < 2 * interval:
        problems.append(
            f"attribution-expiry: {expiry:g}s is less than twice the kubelet-interval, {interval:g}s, so that"
            f" allocation would be unknown between two answers; allowed: {2 * interval:g}s or more"
        )
    manager = values["workload-manager"]
    if values["kube-metadata"] and manager not in {"kubernetes", None}:
        problems.append(
            f"kube-metadata: is on, and the workload-manager is {manager}, whose jobs Kubernetes does not know;"
            " allowed: one of the two"
        )
    problems += [
        f"{key}: names {len(values[key])} keys; allowed: at most {most}"
        for key, most in MOST_KEYS.items()
        if len(values[key] or ()) > most
    ]


def _without_effect(values: _Values) -> list[str]:
    """What was given and is not looked at, as something else is not switched on."""
    warnings: list[str] = []
    if values["job-mapping-dir"] and values["workload-manager"] != "slurm":
        warnings.append("job-mapping-dir: read only with workload-manager slurm; not used")
    if values["kube-metadata"] and values["attribution"] is False:
        warnings.append("kube-metadata: with attribution off nobody holds anything, and the API is not asked; not used")
    if not values["kube-metadata"]:
        warnings += [f"{key}: needs kube-metadata on; not used" for key in ("kubeconfig", *MOST_KEYS) if values[key]]
    else:
        warnings += [
            f"{key}: {name} is never shown: another for every pod, or no label of its makers; not used"
            for key in EXPORTED_KEYS
            for name in values[key] or ()
            if exported_labels.is_never_shown(name)
        ]
    return warnings


def _build(values: _Values, warnings: tuple[str, ...]) -> AgentConfig:
    return AgentConfig(
        listen_host=values["listen"].host,
        listen_port=values["listen"].port,
        release_seconds=values["release-seconds"],
        sample_interval_seconds=values["sample-interval"],
        source=values["source"],
        dcgm_address=values["dcgm-address"] or "",
        idle_threshold_ratio=values["idle-threshold"],
        attribution=values["attribution"],
        kubelet_socket=values["kubelet-socket"],
        kubelet_interval_seconds=values["kubelet-interval"],
        attribution_expiry_seconds=values["attribution-expiry"],
        gpu_resources=values["gpu-resources"],
        node_name=values["node-name"] or socket.gethostname(),
        proc_root=Path(values["proc-root"]),
        pod_log_root=Path(values["pod-log-root"]),
        workload_manager=values["workload-manager"],
        kube_metadata=values["kube-metadata"],
        kube_start_jitter_seconds=values["kube-start-jitter"],
        team_keys=values["team-keys"],
        cost_labels=values["cost-labels"] or (),
        namespace_teams=values["namespace-teams"],
        pod_labels=values["pod-labels"] or (),
        pod_annotations=values["pod-annotations"] or (),
        reservation_namespaces=values["reservation-namespaces"],
        dcgm_names=values["dcgm-names"],
        hostname_label=hostname_label.settled(values["hostname-label"], values["dcgm-names"]),
        dcgm_pod_uid=values["dcgm-pod-uid"],
        dcgm_old_labels=values["dcgm-old-labels"],
        dcgm_model_hyphens=values["dcgm-model-hyphens"],
        xid_count_window_seconds=values["xid-count-window"],
        clock_events_window_seconds=values["clock-events-window"],
        series_limit=values["series-limit"],
        linger_seconds=values["linger"],
        instance_type=values["instance-type"] or "",
        capacity_type=values["capacity-type"] or "",
        region=values["region"] or "",
        state_interval_seconds=values["state-interval"],
        simulate=values["simulate"],
        simulate_hour_seconds=values["simulate-hour"],
        log_format=values["log-format"],
        log_level=values["log-level"],
        warnings=warnings,
        **_optional_paths(values),
    )


def _optional_paths(values: _Values) -> _Values:
    """Paths by the name of their field; ``None`` where there is none."""
    keys = ("web-config", "job-mapping-dir", "kubeconfig", "collectors", "price-book", "state-dir", "lock-dir")
    return {key.replace("-", "_"): Path(values[key]) if values[key] else None for key in keys}
