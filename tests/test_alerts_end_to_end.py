"""From a simulated node through agent, Prometheus and Alertmanager to a webhook: expected and unexpected messages."""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from alerts_support import SHORTER, Alert, AlertStack, alert_stack, until

from gpu_simulator.stack import SUBSTITUTIONS

WASTE = ("GPUUnderutilised", "GPUIdle", "GPUSharedIdle")
FIRST_SECONDS = 110.0
"""Time to the first alerts: an hour of windows takes 30 s, delays take 20 more."""
LATER_SECONDS = 45.0
WORKS_AGAIN_SECONDS = 104.0
"""Time at which the notebook is busy again in its scenario, since the start of its agent."""
Message = tuple[str, Alert]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Messages of the webhook, and the alerts in Prometheus and Alertmanager."""

    notebook: Message
    notebook_again: Message
    server: Message
    instance: Message
    sharer: Message
    shared: Message
    unknown: Message
    without_api: Message
    refused: Message
    down: Message
    held_after: Mapping[tuple[str, str], bool]
    alerts_of_the_killed: frozenset[tuple[str, str]]
    waste: tuple[Mapping[str, str], ...]
    idle: tuple[Mapping[str, str], ...]
    nobody_down: bool


async def tell(stack: AlertStack) -> Story:
    """Run the story: alerts for idle pods, an agent that is killed, and a notebook that is busy again."""
    first = await asyncio.gather(
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="anna"),
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="orphan-9x2k1"),
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="embedder"),
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="idle-slice"),
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="student-4"),
        stack.until_received(FIRST_SECONDS, alertname="GPUUnderutilised", workload_name="forgotten-7d4b9"),
    )
    notebook, refused, server, instance, sharer, without_api = first
    nobody_down = not await stack.alerts('ALERTS{alertname="GPUExporterDown", alertstate="firing"}')
    await stack.kill("doomed")
    down = await stack.until_received(LATER_SECONDS, alertname="GPUExporterDown")

    async def kept_back() -> bool:
        return (await stack.held()).get(("GPUUnderutilised", "orphan-9x2k1"), False)

    await until(kept_back, "Alertmanager keeps back what was said of the killed agent's node", LATER_SECONDS)
    held_after = await stack.held()
    unknown = await stack.until_received(LATER_SECONDS, alertname="GPUActivityUnknown")
    until_it_works = max(0.0, stack.since + WORKS_AGAIN_SECONDS - time.time())
    notebook_again = await stack.until_received(
        until_it_works + LATER_SECONDS, "resolved", alertname="GPUUnderutilised", workload_name="anna"
    )
    shared = await stack.until_received(LATER_SECONDS, alertname="GPUSharedIdle")

    async def over() -> bool:
        return ("GPUUnderutilised", "orphan-9x2k1") not in await stack.held() and not await stack.ask_value(
            'count_over_time(ALERTS{alertname="GPUUnderutilised",workload_name="orphan-9x2k1",alertstate="firing"}[5s])'
        )

    await until(over, "the end of the waste alert on the killed agent's node", LATER_SECONDS)
    return Story(
        notebook=notebook,
        notebook_again=notebook_again,
        server=server,
        instance=instance,
        sharer=sharer,
        shared=shared,
        unknown=unknown,
        without_api=without_api,
        refused=refused,
        down=down,
        held_after=held_after,
        alerts_of_the_killed=frozenset(
            (one["status"], one["labels"]["alertname"])
            for status in ("firing", "resolved")
            for _, one in stack.received(status, workload_name="orphan-9x2k1")
        ),
        waste=tuple(one for one in await stack.alerts() if one["alertname"] in WASTE),
        idle=tuple(await stack.alerts('ALERTS{alertname="GPUIdle", alertstate="firing"}')),
        nobody_down=nobody_down,
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    async def run(directory: Path) -> Story:
        async with alert_stack(directory) as stack:
            return await tell(stack)

    return asyncio.run(run(tmp_path_factory.mktemp("alerts")))


def labels(message: Message) -> Mapping[str, str]:
    found: Mapping[str, str] = message[1]["labels"]
    return found


def summary(message: Message) -> str:
    return str(message[1]["annotations"]["summary"])


def owner(message: Message) -> tuple[str | None, ...]:
    names = ("workload_namespace", "workload_kind", "workload_name", "team")
    return tuple(labels(message).get(name) for name in names)


def test_shortened_durations_are_a_subset_of_the_demo_substitutions() -> None:
    assert set(SHORTER) <= {item.shipped for item in SUBSTITUTIONS}


def test_notebook_alert_reaches_its_team_with_owner_cost_and_links(story: Story) -> None:
    receiver, alert = story.notebook
    assert receiver == "vision-chat"
    assert owner(story.notebook) == ("research", "Notebook", "anna", "vision")
    assert alert["labels"]["severity"] == "warning"
    words = r"leaves its 2 GPUs idle, 12\.32 USD an hour, .*: \S+% used over the last 2h\."
    assert re.fullmatch(f"Notebook research/anna of team vision {words}", summary(story.notebook))
    assert alert["annotations"]["runbook_url"].endswith("/runbook#gpuunderutilised")
    assert "gpu-cost-exporter/alerts-until=" in alert["annotations"]["description"]
    assert alert["annotations"]["dashboard"].endswith("var-namespace=research")


def test_idle_workload_is_announced_once(story: Story) -> None:
    assert not story.idle


def test_notebook_alert_resolves_when_the_notebook_is_active_again(story: Story) -> None:
    receiver, alert = story.notebook_again
    assert receiver == "vision-chat"
    assert alert["labels"] == story.notebook[1]["labels"]
    assert alert["startsAt"] == story.notebook[1]["startsAt"] < alert["endsAt"]


def test_barely_used_server_alert_has_its_use_and_cost(story: Story) -> None:
    assert story.server[0] == "finops-chat"
    assert owner(story.server) == ("serving", "Deployment", "embedder", "search")
    assert labels(story.server)["severity"] == "info"
    text = summary(story.server)
    assert text.startswith("Deployment serving/embedder of team search leaves its GPU idle, ")
    assert text.endswith(" used over the last 1h.")


def test_idle_instance_alerts_and_the_busy_one_on_the_same_gpu_does_not(story: Story) -> None:
    assert owner(story.instance) == ("science", "Pod", "idle-slice", "biology")
    assert " leaves its 2g.20gb MIG slice idle, 1.76 USD an hour, " in summary(story.instance)
    assert "busy-slice" not in alerted(story)


def test_only_the_idle_one_of_four_sharers_alerts(story: Story) -> None:
    assert owner(story.sharer) == ("classroom", "Pod", "student-4", "teaching")
    assert " leaves its 0.25 of a GPU idle" in summary(story.sharer)
    assert re.search(r", 1\.5[234] USD an hour", summary(story.sharer))
    assert not alerted(story) & {"student-1", "student-2", "student-3"}


def test_shared_device_alerts_only_if_both_unmeasured_sharers_are_idle(
    story: Story,
) -> None:
    assert story.shared[0] == "finops-chat"
    assert "shared/both-idle-1 shared/both-idle-2" in summary(story.shared)
    assert not alerted(story) & {"both-idle-1", "both-idle-2", "beside-busy", "busy"}
    assert len({one["uuid"] for one in story.waste if one["alertname"] == "GPUSharedIdle"}) == 1


def test_device_with_unknown_activity_alerts_the_platform_and_not_as_idle(story: Story) -> None:
    assert "unmeasured" not in alerted(story)
    assert story.unknown[0] == "gpu-platform-chat"
    assert labels(story.unknown)["node"] == "node-owners"
    assert "Activity is unknown for 100% of the time that GPUs of model NVIDIA A100-SXM4-80GB" in summary(story.unknown)


def test_opted_out_owners_get_no_alerts(story: Story) -> None:
    assert not alerted(story) & {"muted-by-a-date", "muted-for-good"}


@pytest.mark.parametrize("case", ["without_api", "refused"])
def test_pod_without_metadata_alerts_under_its_own_name(story: Story, case: str) -> None:
    message: Message = getattr(story, case)
    name, gpus = {"without_api": ("forgotten-7d4b9", "GPU"), "refused": ("orphan-9x2k1", "2 GPUs")}[case]
    assert owner(message) == ("research", "Pod", name, None)
    assert message[0] == "research-chat"
    assert summary(message).startswith(f"Pod research/{name} leaves its {gpus} idle")
    assert not alerted(story) & {"busy-5c8d7", "steady-4f6h8"}


def test_killed_agent_alert_names_its_node(story: Story) -> None:
    assert story.nobody_down
    assert story.down[0] == "gpu-platform-chat"
    assert labels(story.down)["node"] == "node-doomed"
    assert "on node node-doomed" in summary(story.down)


def test_killed_agents_node_sends_no_waste_alerts_firing_or_resolved(story: Story) -> None:
    assert story.alerts_of_the_killed == {("firing", "GPUUnderutilised")}
    assert story.held_after["GPUUnderutilised", "orphan-9x2k1"] is True
    assert story.held_after["GPUUnderutilised", "forgotten-7d4b9"] is False


def alerted(story: Story) -> set[str]:
    """Return the workloads with an alert of waste, pending ones included."""
    return {one.get("workload_name", "") for one in story.waste}
