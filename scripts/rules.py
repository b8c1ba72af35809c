"""Writes the rules files and the runbook page from ``rules/src`` and ``docs``; ``--check`` compares."""

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from generated import ROOT, write_or_check
from markdown_it import MarkdownIt
from markdown_it.token import Token

SOURCE = ROOT / "rules" / "src"
RULES = ROOT / "rules" / "prometheus-rules.yaml"
DCGM_RULES = ROOT / "rules" / "prometheus-rules-dcgm-exporter.yaml"
INEFFECTIVE_RULES = ROOT / "rules" / "prometheus-rules-ineffective.yaml"
MANIFEST = ROOT / "deploy" / "kustomize" / "base" / "prometheusrule.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
RUNBOOK_PAGE = ROOT / "exporter" / "service" / "templates" / "runbook.html"

PARTS = ("recording", "ledger", "evidence", "waste", "cost", "health", "exporter", "service")
"""Parts in order: recorded series before the rules that read them."""

DCGM_GROUPS = (("recording", "gpu-workloads"), ("waste", "gpu-waste"))
"""Parts and groups of the waste alerts that also work with dcgm-exporter: dcgm-exporter.yaml records their series."""

DCGM_LACKS = frozenset(
    {
        "workload:gpu_idle_for_seconds:min",
        "workload:gpu_age_seconds:max",
        "GPUSharedIdle",
        "GPUUnallocated",
    }
)
"""Rules on series that only the agent has."""

GROUPS = "groups:\n"

HEADER = """\
# Recording and alerting rules on the agent's own series; for Prometheus 2.42 or later, and vmalert 1.112 or later.
# Made from rules/src/*.yaml by scripts/rules.py; change those, then: make golden. They give the reason for each rule.
#
# - The agent measures. Windows, policies and prices are its own, per owner and node (gpu_owner_*, gpu_pool_*).
# - A recording rule adds nodes up: max first, so that a second scrape of an agent adds nothing, then sum.
#   last_over_time bridges missed scrapes. An outage of Prometheus changes no verdict.
# - gpu-ledger-hours records each hour as a plain difference: a ledger starts at 0, never goes back and has one writer.
# - gpu-waste and gpu-idle-cost judge workloads and pools, gpu-budgets and gpu-new-cost money, gpu-health hardware.
# - gpu-exporter, gpu-exporter-slow and gpu-cost-service report missing monitoring. While a workload is partly
#   unmonitored, GPUWasteInhibitor lets Alertmanager suppress its waste alerts.
# - Unmeasured values are absent: they are in no ratio and raise no alert.
# - docs/runbook.md has a heading for every alert, docs/metrics.md the recorded series, tests/rules/ the unit tests.
# - pint lint finds rule/dependency, group/interval (last_over_time bridges a group's interval), promql/fragile (max by
#   lists the labels) and alerts/template (it parses a query before printf has filled it in).
"""

DCGM_HEADER = """\
# Made from rules/src/*.yaml by scripts/rules.py; change those, then: make golden
# What pint lint finds is explained at the head of prometheus-rules.yaml.
"""

MUTE = "annotate its pods: gpu-cost-exporter/alerts=disabled"
"""The only way to mute that kube-state-metrics shows."""

MANIFEST_HEADER = """\
# Made from rules/src/*.yaml by scripts/rules.py; do not edit here.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpu-cost-exporter
  # kube-prometheus-stack selects rules and monitors by its release name.
  labels:
    release: kube-prometheus-stack
spec:
"""


PAGE = """\
{{# Made from docs/runbook.md by scripts/rules.py; change that, then: make golden #}}
{{% extends "base.html" %}}
{{% block title %}}Runbook{{% endblock %}}
{{% block heading %}}<h1>Runbook</h1>{{% endblock %}}
{{% block period %}}{{% endblock %}}
{{% block filters %}}{{% endblock %}}
{{% block content %}}
<nav class="panel" id="index" aria-label="Alerts">
<dl class="index">
{index}</dl>
</nav>
<div>
<section class="panel prose">
{{% raw %}}
{body}{{% endraw %}}
</section>
<p class="back"><a href="#index">Index of alerts</a></p>
</div>
{{% endblock %}}
"""


def indented(text: str, width: int) -> str:
    """Return a text with all non-empty lines indented."""
    return "".join(f"{' ' * width}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def compact(text: str) -> str:
    """Return the rules for users: without comments of the sources, and with empty lines between groups only."""
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"expr: \|\n +", "expr: ", text)
    text = re.sub(r"\n +(\))(?=\n)", r"\1", text)
    return re.sub(r"\n\n(?=      - )", "\n", text)


def groups_of(name: str) -> str:
    """Return the groups of one part, without ``groups:``."""
    return compact((SOURCE / f"{name}.yaml").read_text(encoding="utf-8").split(GROUPS, 1)[1].rstrip() + "\n")


def joined() -> str:
    """Return the rules file with all parts."""
    return HEADER + GROUPS + "\n".join(groups_of(name) for name in PARTS)


def group(part_name: str, name: str, without: frozenset[str]) -> str:
    """Return one group of a part without the rules in ``without``."""
    text = re.split(r"\n+(?=  - name:)", groups_of(part_name))
    (found,) = (one for one in text if re.search(rf"^  - name: {name}$", one, flags=re.MULTILINE))
    head, rules = found.rstrip().split("    rules:\n", 1)
    kept = [
        rule
        for rule in re.split(r"\n+(?=      - )", rules)
        if without.isdisjoint(re.findall(r"- (?:record|alert): (\S+)", rule))
    ]
    return compact(head + "    rules:\n" + "\n\n".join(kept) + "\n")


def for_dcgm_exporter() -> str:
    """Return the waste alerts on series of dcgm-exporter and kube-state-metrics."""
    head, _ = (SOURCE / "dcgm-exporter.yaml").read_text(encoding="utf-8").split(GROUPS, 1)
    adapter = DCGM_HEADER + head + GROUPS + groups_of("dcgm-exporter")
    text = "\n".join([adapter, *(group(part, name, DCGM_LACKS) for part, name in DCGM_GROUPS)])
    return re.sub(r"annotate\s+a\s+pod\s+or\s+the\s+namespace:\s+gpu-cost-exporter/alerts-until=<[^>]+>", MUTE, text)


def ineffective() -> str:
    """Return the alert that is off by default, with the comments of its source."""
    head, _ = (SOURCE / "ineffective.yaml").read_text(encoding="utf-8").split(GROUPS, 1)
    return DCGM_HEADER + head + GROUPS + groups_of("ineffective")


def manifest(rules: str) -> str:
    """Wrap the text of a rules file as a PrometheusRule."""
    return MANIFEST_HEADER + indented(rules[rules.index(GROUPS) :], 2)


def page(markdown: str) -> str:
    """Return the template of the runbook's page: an index, headings with anchors, links to other files as text."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(markdown.partition("\n")[2])
    alerts: dict[str, list[str]] = {}
    for opened, text in pairwise(tokens):
        if opened.type == "heading_open":
            anchor = re.sub(r"[^a-z0-9 -]", "", text.content.lower()).replace(" ", "-")
            opened.attrSet("id", anchor)
            if opened.tag == "h2":
                alerts[text.content] = []
            else:
                list(alerts.values())[-1].append(f'<a href="#{anchor}">{text.content}</a>')
        if text.children:
            text.children = list(_without_files(text.children))
    index = "".join(f"<dt>{group}</dt><dd>{' '.join(links)}</dd>\n" for group, links in alerts.items() if links)
    return PAGE.format(index=index, body=parser.renderer.render(tokens, parser.options, {}))


def _without_files(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens of a line, without links to files that the service does not have."""
    dropped = False
    for token in tokens:
        if token.type == "link_open":
            dropped = not str(token.attrGet("href")).startswith(("#", "https://"))
        if not (dropped and token.type in {"link_open", "link_close"}):
            yield token


def outputs() -> dict[Path, str]:
    """Return the contents of each generated file."""
    rules = joined()
    return {
        RULES: rules,
        DCGM_RULES: for_dcgm_exporter(),
        INEFFECTIVE_RULES: ineffective(),
        MANIFEST: manifest(rules),
        RUNBOOK_PAGE: page(RUNBOOK.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    sys.exit(write_or_check(outputs()))
