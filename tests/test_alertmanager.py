"""The example for Alertmanager: receivers, no paging for money, storms, and inhibition."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alerts_support import EXAMPLE, QUIET_SECONDS, TEMPLATE, alert, alertmanager
from files_support import read_yaml

ROOT = EXAMPLE.parent.parent
RULES: list[dict[str, Any]] = [
    rule
    for group in read_yaml((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = sorted({(rule["alert"], rule["labels"]["severity"]) for rule in RULES if "alert" in rule})
TRAIN = {"workload_namespace": "research", "workload_kind": "Job", "workload_name": "train"}


@pytest.fixture
def amtool() -> str:
    found = shutil.which("amtool")
    if found is None:
        pytest.skip("needs amtool on the PATH: make install")
    return found


def receiver(amtool: str, **labels: str) -> str:
    """Return the receiver of an alert with these labels."""
    words = [f"{name}={value}" for name, value in labels.items()]
    result = subprocess.run(
        [amtool, "config", "routes", "test", f"--config.file={EXAMPLE}", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


def test_alertmanager_accepts_the_example(amtool: str) -> None:
    result = subprocess.run([amtool, "check-config", str(EXAMPLE)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 templates" in result.stdout


@pytest.mark.parametrize(("name", "severity"), ALERTS, ids=str)
def test_every_alert_has_a_receiver_and_only_broken_hardware_pages(amtool: str, name: str, severity: str) -> None:
    reported = receiver(amtool, alertname=name, severity=severity, cluster="c", node="n", gpu="0")
    if severity == "none":
        assert reported == "nobody"
    elif severity == "critical":
        assert reported == "gpu-pager"
    else:
        assert reported in {"gpu-platform-chat", "finops-chat"}
    paged = receiver(amtool, alertname=name, severity=severity, team="vision", workload_namespace="research")
    assert (paged == "gpu-pager") == (severity == "critical")


def test_cost_and_idle_alerts_have_no_critical_severity() -> None:
    critical = {name for name, severity in ALERTS if severity == "critical"}
    money = re.compile(r"Idle|Under|Unalloc|Budget|Cost|Expensive|Price|Ledger|Exporter")
    assert not [name for name in critical if money.search(name)]


@pytest.mark.parametrize(
    ("labels", "reported"),
    [
        ({"team": "vision", "workload_namespace": "research"}, "vision-chat"),
        ({"workload_namespace": "research"}, "research-chat"),
        ({"workload_namespace": "research-2"}, "research-chat"),
        ({"workload_namespace": "researchers"}, "finops-chat"),
        ({"workload_namespace": "other", "team": "other"}, "finops-chat"),
        ({}, "finops-chat"),
    ],
)
@pytest.mark.parametrize("severity", ["warning", "info"])
def test_waste_alerts_go_to_the_team_then_the_namespace_then_finops(
    amtool: str, severity: str, labels: dict[str, str], reported: str
) -> None:
    assert receiver(amtool, alertname="GPUUnderutilised", severity=severity, **labels) == reported


def test_unrelated_alerts_keep_their_receiver(amtool: str) -> None:
    assert receiver(amtool, alertname="NodeDown", severity="critical", node="n") == "others"


def test_alert_names_in_the_example_exist_in_the_rules() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    named = set(re.findall(r"\bGPU[A-Z]\w+", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)))
    assert named <= {name for name, _ in ALERTS} | {"GPUBudget"}


def test_inhibit_rules_compare_only_labels_that_alerts_have() -> None:
    config = read_yaml(EXAMPLE.read_text(encoding="utf-8"))
    compared = {label for rule in config["inhibit_rules"] for label in rule["equal"]} - {"alertname"}
    expressions = " ".join(str(rule["expr"]) for rule in RULES)
    assert all(re.search(rf"by \([^)]*\b{label}\b", expressions) for label in compared)


async def test_alert_storm_sends_one_message_per_owner_and_severity_and_no_page(
    tmp_path: Path,
) -> None:
    async with alertmanager(tmp_path) as running:
        storm = [
            alert(
                "GPUUnderutilised",
                "warning" if number % 20 < 10 else "info",
                cluster="c",
                workload_namespace=f"research-{number % 5}",
                workload_kind="Job",
                workload_name=f"job-{number}",
                **({"team": "vision"} if number % 10 < 5 else {}),
            )
            for number in range(1000)
        ]
        await running.post(storm)
        await running.receivers.until(lambda all_of: len(all_of.got) >= 20)
        await asyncio.sleep(QUIET_SECONDS)
        receivers = running.receivers
        assert not receivers.of("gpu-pager")
        # Five namespaces with a team, five without; alerts on low cost are sent at a longer interval.
        assert len(receivers.of("vision-chat")) == len(receivers.of("research-chat")) == 5 * 2
        assert len(receivers.got) == 20
        title = receivers.of("vision-chat")[0]["attachments"][0]["title"]
        assert re.fullmatch(r"50 firing GPUUnderutilised in c, namespace research-\d, team vision", title)
        text = receivers.of("vision-chat")[0]["attachments"][0]["text"]
        assert text.count("mute: ") == 20
        assert "The first 20 of 50; all alerts: https://alerts.example.com/#/alerts" in text


async def test_dashboard_link_with_a_host_is_unchanged(tmp_path: Path) -> None:
    words = {"dashboard": "https://grafana.example.org/d/gpu-cost-fleet/gpu-fleet"}
    async with alertmanager(tmp_path) as running:
        await running.post([alert("GPUUnderutilised", "warning", annotations=words, cluster="c", **TRAIN)])
        await running.receivers.until(lambda all_of: bool(all_of.of("research-chat")))
        text = running.receivers.of("research-chat")[0]["attachments"][0]["text"]
    assert f"\ndashboard: {words['dashboard']}\n" in text


async def test_message_has_the_summary_start_time_links_and_mute_link(tmp_path: Path) -> None:
    words = {
        "summary": "Job research/train leaves 8 of 8 GPUs idle; 24.00 USD an hour.",
        "description": "Ask for fewer GPUs. Mute: annotate it.",
        "dashboard": "/d/gpu-cost-fleet/gpu-fleet?var-namespace=research",
    }
    async with alertmanager(tmp_path) as running:
        idle = alert("GPUUnderutilised", "warning", annotations=words, cluster="c", **TRAIN)
        await running.post([idle])
        await running.receivers.until(lambda all_of: bool(all_of.of("research-chat")))
        text = running.receivers.of("research-chat")[0]["attachments"][0]["text"]
        await running.post([idle], over=True)
        await running.receivers.until(lambda all_of: len(all_of.of("research-chat")) == 2)
        over = running.receivers.of("research-chat")[1]["attachments"][0]
    first, since, fix, dashboard, runbook, mute = text.strip().splitlines()
    assert first == f"warning GPUUnderutilised: {words['summary']}"
    assert re.fullmatch(r"since \d{1,2} [A-Z][a-z]{2} \d\d:\d\d UTC", since)
    assert fix == words["description"]
    assert dashboard == f"dashboard: https://grafana.example.com{words['dashboard']}"
    assert runbook == "runbook: https://example.com/docs/runbook.md#gpuunderutilised"
    assert mute == (
        "mute: https://alerts.example.com/#/silences/new?filter=%7Balertname%3D%22GPUUnderutilised%22"
        "%2Ccluster%3D%22c%22%2Cworkload_kind%3D%22Job%22%2Cworkload_name%3D%22train%22"
        "%2Cworkload_namespace%3D%22research%22%7D"
    )
    assert over["title"] == "resolved GPUUnderutilised in c, namespace research"
    assert over["text"].strip() == f"resolved: GPUUnderutilised: {words['summary']}"


async def test_message_escapes_mentions_and_links_in_names(tmp_path: Path) -> None:
    team = "<!channel> & <https://evil.example|click to fix>"
    plain = "&lt;!channel&gt; &amp; &lt;https://evil.example|click to fix&gt;"
    labels = {**TRAIN, "workload_namespace": "other", "workload_name": team, "team": team, "cluster": team}
    words = {"summary": f"idle, {team}", "description": f"Ask {team}.", "dashboard": f"/d?var-namespace={team}"}
    async with alertmanager(tmp_path) as running:
        idle = alert("GPUUnderutilised", "warning", annotations=words, **labels)
        await running.post([idle])
        await running.receivers.until(lambda all_of: len(all_of.got) == 1)
        await running.post([idle], over=True)
        await running.receivers.until(lambda all_of: len(all_of.got) == 2)
        firing, over = (message["attachments"][0] for message in running.receivers.of("finops-chat"))
        assert "<" not in running.receivers.text
    assert firing["title"] == f"1 firing GPUUnderutilised in {plain}, namespace other, team {plain}"
    assert f"GPUUnderutilised: idle, {plain}\n" in firing["text"]
    assert f"\nAsk {plain}.\n" in firing["text"]
    assert over["text"].strip() == f"resolved: GPUUnderutilised: idle, {plain}"


async def test_dead_exporter_inhibits_only_the_waste_alerts_of_its_node(
    tmp_path: Path,
) -> None:
    async with alertmanager(tmp_path) as running:
        seen = {**TRAIN, "workload_name": "seen"}
        namesake = {**TRAIN, "workload_namespace": "research-2"}
        dead = alert("GPUExporterDown", "warning", instance="n1:9400", node="n1")
        inhibitor = alert("GPUWasteInhibitor", "none", team="vision", **TRAIN)
        waste = [
            alert("GPUUnderutilised", "warning", team="vision", **TRAIN),
            alert("GPUIdle", "warning", team="vision", **TRAIN),
            alert("GPUSharedIdle", "info", node="n1", gpu="3", uuid="GPU-3"),
            alert("GPUActivityUnknown", "info", node="n1", model="A100"),
            alert("GPUSharedIdle", "info", node="n2", gpu="3", uuid="GPU-4"),
            alert("GPUUnderutilised", "warning", **seen),
            alert("GPUUnderutilised", "warning", **namesake),
        ]
        await running.post([dead, inhibitor])
        await running.receivers.until(lambda all_of: bool(all_of.of("gpu-platform-chat")))
        await running.post(waste)
        await running.receivers.until(lambda all_of: len(all_of.of("research-chat")) == 2)
        assert await running.inhibited() == {"train", "n1"}
        await running.post(waste[:2], over=True)
        await asyncio.sleep(QUIET_SECONDS)
        receivers = running.receivers
        assert not receivers.of("vision-chat")
        assert "GPUActivityUnknown" not in receivers.text
        assert "GPUWasteInhibitor" not in receivers.text
        assert [one["attachments"][0]["title"] for one in receivers.of("gpu-platform-chat")] == [
            "1 firing GPUExporterDown"
        ]
        shared = [one["attachments"][0]["text"] for one in receivers.of("finops-chat")]
        assert len(shared) == 1
        assert "GPUSharedIdle of n2" in shared[0]
        assert "n1" not in shared[0]


async def test_waste_alerts_resume_when_the_exporter_returns(tmp_path: Path) -> None:
    async with alertmanager(tmp_path) as running:
        inhibitor = alert("GPUWasteInhibitor", "none", **TRAIN)
        await running.post([inhibitor])
        await asyncio.sleep(1.0)
        await running.post([alert("GPUUnderutilised", "warning", **TRAIN)])
        await asyncio.sleep(QUIET_SECONDS)
        assert not running.receivers.got
        await running.post([inhibitor], over=True)
        await running.receivers.until(lambda all_of: bool(all_of.of("research-chat")))


async def test_worst_alert_of_a_workload_or_gpu_inhibits_the_lesser_ones(tmp_path: Path) -> None:
    async with alertmanager(tmp_path) as running:
        gpu = {"cluster": "c", "node": "n1", "gpu": "0", "uuid": "GPU-0"}
        worst = [
            alert("GPUUnderutilised", "warning", **TRAIN),
            alert("GPUXidCritical", "critical", **gpu),
            alert("GPUBudgetProjectedOverrun", "warning", budget="b", period="month", currency="USD"),
        ]
        rest = [
            alert("GPUUnderutilised", "info", **TRAIN),
            alert("GPUIdle", "warning", **{**TRAIN, "workload_name": "partly"}),
            alert("GPUXidWarning", "warning", **gpu),
            alert("GPUXidWarning", "warning", **{**gpu, "gpu": "1", "uuid": "GPU-1"}),
            alert("GPUBudgetBurn", "info", budget="b", period="month", currency="USD"),
            alert("GPUBudgetBurn", "info", budget="other", period="month", currency="USD"),
        ]
        await running.post(worst)
        await running.receivers.until(lambda all_of: {name for name, _ in all_of.got} >= {"gpu-pager", "finops-chat"})
        await running.post(rest)
        await asyncio.sleep(QUIET_SECONDS)
        reported = running.receivers
        assert "GPUIdle of partly" in reported.text
        assert await running.inhibited() >= {"train"}
        assert [one["groupLabels"]["alertname"] for one in reported.of("gpu-pager")] == ["GPUXidCritical"]
        chat = reported.of("gpu-platform-chat")
        assert len(chat) == 1
        assert "1 firing GPUXidWarning" in chat[0]["attachments"][0]["title"]
        budgets = [one["attachments"][0]["text"] for one in reported.of("finops-chat")]
        assert sum("GPUBudgetBurn" in one for one in budgets) == 1
        assert not any("budget%3D%22b%22" in one and "GPUBudgetBurn" in one for one in budgets)


async def test_budget_without_figures_sends_no_resolved_message(tmp_path: Path) -> None:
    async with alertmanager(tmp_path) as running:
        month = {"budget": "b", "period": "month", "currency": "USD", "workload_namespace": "research"}
        burns = [alert("GPUBudgetBurn", "warning", cluster=name, node=name, **month) for name in ("east", "west")]
        await running.post(burns)
        await running.receivers.until(lambda all_of: len(all_of.of("research-chat")) == 2)
        # One service elsewhere has the budgets of several clusters.
        await running.post(
            [
                alert("GPUCostServiceDown", "warning", cluster="management"),
                alert("GPUBudgetInhibitor", "none", cluster="east", **month),
            ]
        )
        await running.receivers.until(lambda all_of: bool(all_of.of("finops-chat")))
        await running.post(burns, over=True)
        await running.receivers.until(lambda all_of: len(all_of.of("research-chat")) == 3)
        await asyncio.sleep(QUIET_SECONDS)
        titles = [one["attachments"][0]["title"] for one in running.receivers.of("research-chat")]
        assert [title for title in titles if title.startswith("resolved")] == [
            "resolved GPUBudgetBurn in west, namespace research"
        ]


async def test_budget_alert_inhibits_only_its_own_lesser_alerts(tmp_path: Path) -> None:
    async with alertmanager(tmp_path) as running:
        month = {"budget": "b", "period": "month", "currency": "USD", "workload_namespace": "research"}
        others = ({**month, "budget": "other"}, {**month, "period": "quarter"}, {**month, "team": "core"})
        await running.post([alert("GPUBudgetBurn", "warning", **month)])
        await running.receivers.until(lambda all_of: bool(all_of.of("research-chat")))
        await running.post(alert("GPUBudgetBurn", "info", node=str(n), **one) for n, one in enumerate((month, *others)))
        await asyncio.sleep(1.0)
        assert await running.inhibited() == {"0"}


@pytest.mark.parametrize("kind", ["text", "html"])
def test_template_renders_for_email_and_quotes_labels_in_links(amtool: str, tmp_path: Path, kind: str) -> None:
    labels = {"alertname": "GPUUnpricedDevices", "severity": "warning", "model": "NVIDIA H100 & more"}
    words = {"summary": "<b>x & y", "description": "", "dashboard": ""}
    one = {"status": "firing", "labels": labels, "annotations": words, "startsAt": "2026-11-01T12:00:00Z"}
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"status": "firing", "externalURL": "https://a", "alerts": [one]}), encoding="utf-8")
    command = [amtool, "template", "render", f"--template.glob={TEMPLATE}", f"--template.data={data}"]
    command += [f"--template.type={kind}", '--template.text={{ template "gpu.title" . }} {{ template "gpu.text" . }}']
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "since 1 Nov 12:00 UTC" in result.stdout
    assert "GPUUnpricedDevices: &lt;b&gt;x &amp; y\n" in result.stdout
    link = "https://a/#/silences/new?filter=%7Balertname%3D%22GPUUnpricedDevices%22"
    assert f"{link}%2Cmodel%3D%22NVIDIA%20H100%20%26%20more%22%7D" in result.stdout


def test_example_names_the_template() -> None:
    assert read_yaml(EXAMPLE.read_text(encoding="utf-8"))["templates"] == [TEMPLATE.name]
