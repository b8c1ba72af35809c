"""The runbook of the cost service: every alert links to its heading, and each section is complete."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from files_support import read_yaml
from service_support import running

ROOT = Path(__file__).resolve().parent.parent
NOWHERE = "http://127.0.0.1:9"
RULES = [
    rule
    for name in ("prometheus-rules", "prometheus-rules-ineffective")
    for group in read_yaml((ROOT / "rules" / f"{name}.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
SECTIONS = dict(
    re.findall(
        r"^### (GPU\w+)\n(.*?)(?=^##|\Z)",
        (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
)
"""Text of each alert's section."""
PARTS = ["Who acts.", "Meaning.", "False alarms.", "Check.", "Fix.", "Message.", "Mute."]


def blocks(section: str, language: str) -> list[str]:
    """Return the lines of all blocks of a language in a section: one query or command each."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


QUERIES = [(alert, query) for alert, section in SECTIONS.items() for query in blocks(section, "promql")]


@cache
def carried() -> dict[str, set[str]]:
    """Return the labels of each alert: those that its unit tests expect, and those that its expression sums by."""
    found = {rule["alert"]: {"cluster"} for rule in RULES if "alert" in rule}
    for rule in RULES:
        for names in re.findall(r"\b(?:by|group_left) \(([^)]*)\)", rule["expr"]) if "alert" in rule else ():
            found[rule["alert"]] |= set(re.findall(r"\w+", names))
    for path in (ROOT / "tests" / "rules").glob("*.yaml"):
        for test in read_yaml(path.read_text(encoding="utf-8"))["tests"]:
            for case in test.get("alert_rule_test", ()):
                for alert in case.get("exp_alerts") or ():
                    found[case["alertname"]] |= set(alert["exp_labels"])
    return found


@pytest.mark.parametrize(("alert", "section"), SECTIONS.items(), ids=list(SECTIONS))
def test_every_runbook_section_is_complete_and_its_commands_parse(alert: str, section: str) -> None:
    assert re.findall(r"^\*\*([A-Z][a-z ]+\.)\*\*", section, flags=re.MULTILINE) == PARTS
    assert blocks(section, "promql")
    commands = blocks(section, "sh")
    assert any(line.startswith("kubectl ") for line in commands)
    mute = section.partition("**Mute.**")[2]
    assert "Not needed." in mute or f"amtool silence add alertname={alert} " in mute
    assert set(re.findall(r"\$([a-z_]+)", section)) <= carried()[alert]
    done = subprocess.run(["bash", "-n"], input="\n".join(commands), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def links() -> set[str]:
    """Return the links to the runbook of all rules and dashboards, without the host."""
    found = set()
    for path in (ROOT / "rules").glob("*.yaml"):
        for group in read_yaml(path.read_text(encoding="utf-8"))["groups"]:
            found |= {rule["annotations"]["runbook_url"] for rule in group["rules"] if "alert" in rule}
    for path in (ROOT / "dashboards").glob("*.json"):
        found |= set(re.findall(r"[$]{cost_page}(/runbook[^\"]*)", path.read_text(encoding="utf-8")))
    return {link.removeprefix("http://localhost:9401") for link in found}


async def test_every_link_to_the_runbook_leads_to_a_heading() -> None:
    async with running(NOWHERE) as site:
        answer = await site.get("/runbook", headers={"Accept": "text/html"})
    assert answer.status == 200, "the runbook works without Prometheus"
    assert len(links()) > 40
    headings = {"", *re.findall(r'<h[1-6] id="([^"]+)"', answer.text)}
    for link in links():
        path, _, heading = link.partition("#")
        assert path == "/runbook", link
        assert heading in headings, link


@pytest.mark.parametrize(
    ("link", "page"),
    [
        ("/d/gpu-cost-fleet/gpu-fleet?var-namespace=a%20b", "/by/workload?namespace=a%20b"),
        ("/d/gpu-cost-oncall/gpu-on-call?var-node=n1", "/by/node?node=n1"),
        ("/d/gpu-cost-finops/gpu-finops", "/"),
    ],
)
async def test_dashboard_links_redirect_to_pages_without_grafana(link: str, page: str) -> None:
    async with running(NOWHERE, external_url="https://example.org/cost") as site:
        answer = await site.get(f"/cost{link}")
    assert (answer.status, answer.headers["location"]) == (302, f"/cost{page}")


async def test_every_runbook_link_has_a_target_and_the_index_has_every_alert() -> None:
    async with running(NOWHERE, external_url="https://example.org/cost") as site:
        text = (await site.get("/cost/runbook")).text
    body = text[text.index('<nav class="panel"') : text.index("</main>")]
    headings = set(re.findall(r'id="([^"]+)"', text))
    for link in re.findall(r'href="([^"]+)"', body):
        assert link.startswith("https://") or link.removeprefix("#") in headings, link
    index = body[: body.index("</nav>")]
    assert re.findall(r'href="#(gpu\w+)"', index) == [alert.lower() for alert in SECTIONS]
