"""The runbook that the cost service serves: every alert's link leads to its heading."""

import re
from pathlib import Path

import yaml
from service_support import running

ROOT = Path(__file__).resolve().parent.parent
NOWHERE = "http://127.0.0.1:9"


def links() -> set[str]:
    """Return the links to the runbook of all rules and dashboards, without the host."""
    found = set()
    for path in (ROOT / "rules").glob("*.yaml"):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            found |= {rule["annotations"]["runbook_url"] for rule in group["rules"] if "alert" in rule}
    for path in (ROOT / "dashboards").glob("*.json"):
        found |= set(re.findall(r"[$]{cost_page}(/runbook[^\"]*)", path.read_text(encoding="utf-8")))
    return {link.removeprefix("http://localhost:9401") for link in found}


async def test_every_link_to_the_runbook_leads_to_a_heading() -> None:
    async with running(NOWHERE) as site:
        answer = await site.get("/runbook", headers={"Accept": "text/html"})
    assert answer.status == 200, "it is there while Prometheus is not"
    assert len(links()) > 40
    headings = {"", *re.findall(r'<h[1-6] id="([^"]+)"', answer.text)}
    for link in links():
        path, _, heading = link.partition("#")
        assert path == "/runbook", link
        assert heading in headings, link


async def test_links_of_the_runbook_lead_somewhere() -> None:
    async with running(NOWHERE, external_url="https://example.org/cost") as site:
        text = (await site.get("/cost/runbook")).text
    body = text[text.index("<section") :]
    headings = set(re.findall(r'id="([^"]+)"', text))
    for link in re.findall(r'href="([^"]+)"', body[: body.index("</section>")]):
        assert link.startswith("https://") or link.removeprefix("#") in headings, link
