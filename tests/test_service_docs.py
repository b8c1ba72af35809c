import re
from pathlib import Path

from fleet_support import FleetServer
from service_support import running

from exporter.service.openapi import ENDPOINTS, PLAIN
from exporter.service.opencost_query import PARTS
from exporter.service.settings import OPTIONS

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "service.md").read_text(encoding="utf-8")


async def test_every_documented_example_is_answered(fleet_prometheus: FleetServer) -> None:
    examples = re.findall(r"^\$ curl -s\w* 'localhost:9401(\S+)'$", TEXT, re.MULTILINE)
    assert len(examples) > 5
    async with running(fleet_prometheus.url) as site:
        for example in examples:
            answer = await site.get(example)
            assert answer.status == 200, (example, answer.text)


def test_every_option_is_explained() -> None:
    table = TEXT.partition("## Options")[2].partition("## Paths")[0]
    assert set(re.findall(r"`(--[a-z-]+)", table)) >= {option.flag for option in OPTIONS}


def test_every_path_is_documented() -> None:
    table = TEXT.partition("## Paths")[2].partition("```")[0]
    named = set(re.findall(r"`(/[^`\s]*)`", table))
    assert named >= {endpoint.path for endpoint in ENDPOINTS} | {path for path, _, _ in PLAIN}


def test_every_aggregation_is_documented() -> None:
    section = TEXT.partition("## OpenCost's API")[2]
    assert set(re.findall(r"`([a-zA-Z:]+)`", section)) >= set(PARTS)
