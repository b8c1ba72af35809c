"""Address and credentials of Prometheus: flags before environment, all mistakes at once, no secret in a message."""

import argparse
from pathlib import Path

import pytest

from exporter.config.prometheus_options import PrometheusSettings, add_prometheus_options, prometheus_settings
from exporter.errors import ConfigError


def settled(*flags: str, **environ: str) -> PrometheusSettings:
    parser = argparse.ArgumentParser()
    add_prometheus_options(parser)
    return prometheus_settings(
        parser.parse_args(flags), {f"GPU_COST_EXPORTER_{name}": value for name, value in environ.items()}
    )


def problems(*flags: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        settled(*flags, **environ)
    return caught.value.problems


def test_url_is_the_only_required_setting() -> None:
    assert settled("--prometheus", "https://mimir.example/prometheus/") == PrometheusSettings(
        url="https://mimir.example/prometheus"
    )


def test_flags_win_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    settings = settled(
        "--prometheus-headers=X-Scope-OrgID=a|b,X-Extra=1",
        "--prometheus-concurrency=8",
        PROMETHEUS="http://[::1]:9090",
        PROMETHEUS_CONCURRENCY="2",
        PROMETHEUS_TIMEOUT="2m",
        PROMETHEUS_TOKEN_FILE=str(tmp_path / "token"),
        CLUSTER_LABEL="k8s_cluster",
        CONFIG="/no/such/file",
    )
    assert settings == PrometheusSettings(
        url="http://[::1]:9090",
        token_file=tmp_path / "token",
        headers=(("X-Scope-OrgID", "a|b"), ("X-Extra", "1")),
        timeout_seconds=120,
        concurrency=8,
        cluster_label="k8s_cluster",
    )


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(
        "--prometheus=ftp://host",
        f"--prometheus-token-file={tmp_path}",
        "--prometheus-username=finops",
        f"--prometheus-key-file={tmp_path / 'key'}",
        "--prometheus-timeout=1",
        "--prometheus-headers=X-A=1,x-a=2,Authorization=Bearer secret",
        PROMETHEUS_RETRIES="many",
    )
    reported = "\n".join(found)
    for words in (
        "prometheus (from --prometheus): value 'ftp://host' is not an address",
        "prometheus-token-file: " + f"{tmp_path} is a directory",
        "allowed: one way to get in",
        "prometheus-username: needs prometheus-password-file",
        "prometheus-key-file: does nothing without prometheus-cert-file",
        f"prometheus-key-file: {tmp_path / 'key'} is not there",
        "prometheus-timeout (from --prometheus-timeout): value '1'",
        "prometheus-headers: x-a is given twice",
        "Authorization would be seen in process lists",
        "prometheus-retries (from GPU_COST_EXPORTER_PROMETHEUS_RETRIES): value 'many'",
    ):
        assert words in reported
    assert "secret" not in reported


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:hunter2@host:9090", "--prometheus-password-file"),
        ("https://hunter2@host", "--prometheus-password-file"),
        ("ftp://user:hunter2@host", "--prometheus-password-file"),
        ("//user:hunter2@host:9090", "--prometheus-password-file"),
        ("http://host:9090?token=hunter2", "without ? and #"),
        ("http://[hunter2", "not an address"),
        ("http://host:port", "not an address"),
        ("http://host:0", "not an address"),
        ("host:9090", "not an address"),
        ("http:///path", "not an address"),
        ("http://a b", "not an address"),
        ("http://host:9090/graph", "/api/v1 is added"),
        ("http://host:9090/api/v1", "/api/v1 is added"),
    ],
)
def test_invalid_url_is_reported_without_possible_secrets(url: str, words: str) -> None:
    (reported,) = problems(f"--prometheus={url}")
    assert words in reported
    assert "hunter2" not in reported


@pytest.mark.parametrize(
    "header", ["secret", "Host=secret", "X A=secret", "X-A=", "Content-Length=secret", "X-A=s\tecret"]
)
def test_invalid_header_is_reported_without_its_value(header: str) -> None:
    (reported,) = problems("--prometheus=http://host", f"--prometheus-headers={header}")
    assert "is not a header" in reported
    assert "ecret" not in reported


def test_missing_url_is_reported() -> None:
    (reported,) = problems()
    assert reported.startswith("prometheus: not given; give an address")
