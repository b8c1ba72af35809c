from pathlib import Path

import pytest

from exporter.config.prometheus_options import PROMETHEUS_OPTIONS
from exporter.errors import ConfigError
from exporter.service.settings import OPTIONS, load_settings

PROMETHEUS = {"prometheus": "http://prometheus:9090"}


def problems(flags: dict[str, object], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environ or {})
    return list(caught.value.problems)


def test_prometheus_url_is_the_only_required_setting() -> None:
    settings = load_settings(PROMETHEUS, {})
    assert settings.prometheus.url == "http://prometheus:9090"
    assert (settings.serving.listen.host, settings.serving.listen.port) == ("", 9401)
    assert settings.fleet.store is None
    assert settings.path_prefix == ""
    assert settings.warnings == ()


def test_missing_url_is_reported_with_its_flag_and_variable() -> None:
    (problem,) = problems({})
    assert "--prometheus" in problem
    assert "GPU_COST_EXPORTER_PROMETHEUS" in problem


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text('prometheus: http://file:9090\ntitle: file\nlisten: ":1"\nrefresh-interval: 1m\n')
    environ = {"GPU_COST_EXPORTER_TITLE": "environment", "GPU_COST_EXPORTER_LISTEN": ":2"}
    settings = load_settings({"config": str(file), "listen": ":3"}, environ)
    assert settings.prometheus.url == "http://file:9090"
    assert (settings.serving.listen.port, settings.serving.title) == (3, "environment")
    assert settings.fleet.refresh_interval_seconds == 60.0


def test_all_mistakes_are_reported_at_once_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("refresh-intervall: 5m\nhistory: 3 months\n")
    found = problems(
        {
            "config": str(file),
            "listen": "here",
            "external-url": "example.org/cost",
            "prometheus": "http://user:secret@prometheus:9090",
            "store": str(tmp_path / "nowhere" / "days.sqlite"),
        },
        {"GPU_COST_EXPORTER_LOG_LEVEL": "loud"},
    )
    for words in (
        f"{file}:1: refresh-intervall: unknown key; did you mean 'refresh-interval'?",
        f"history (from {file}:2): value '3 months'",
        "listen (from --listen): value 'here'",
        "external-url (from --external-url)",
        "prometheus-password-file",
        "nowhere is no directory",
        "log-level (from GPU_COST_EXPORTER_LOG_LEVEL): value 'loud'",
    ):
        assert any(words in problem for problem in found), words
    assert "secret" not in "".join(found)


def test_directory_is_refused_as_a_store(tmp_path: Path) -> None:
    (problem,) = problems({**PROMETHEUS, "store": str(tmp_path)})
    assert str(tmp_path / "days.sqlite") in problem


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("https://example.org", ""),
        ("https://example.org/", ""),
        ("https://example.org/cost", "/cost"),
        ("http://example.org:8080/a/b/", "/a/b"),
    ],
)
def test_the_path_of_the_external_address_is_the_prefix_of_links(url: str, prefix: str) -> None:
    settings = load_settings({**PROMETHEUS, "external_url": url}, {})
    assert settings.path_prefix == prefix
    assert settings.serving.external_url == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["example.org", "ftp://example.org", "https://user:pw@example.org", "https://example.org/?a=1", "https:///x"]
)
def test_invalid_external_url_is_refused(url: str) -> None:
    (problem,) = problems({**PROMETHEUS, "external_url": url})
    assert problem.startswith("external-url")


def test_misspelt_variable_gives_a_warning() -> None:
    (warning,) = load_settings(PROMETHEUS, {"GPU_COST_EXPORTER_BUGETS": "x"}).warnings
    assert "did you mean 'GPU_COST_EXPORTER_BUDGETS'?" in warning


def test_every_option_has_a_unique_name_and_a_help_sentence() -> None:
    keys = [option.key for option in OPTIONS]
    assert len(set(keys)) == len(keys)
    assert {option.key for option in PROMETHEUS_OPTIONS} < set(keys)
    assert all(option.help.endswith(".") for option in OPTIONS)
