"""Makes the rules files from their parts in ``rules/src``; ``--check`` only compares."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "rules" / "src"
RULES = ROOT / "rules" / "prometheus-rules.yaml"
DCGM_RULES = ROOT / "rules" / "prometheus-rules-dcgm-exporter.yaml"
MANIFEST = ROOT / "deploy" / "kustomize" / "base" / "prometheusrule.yaml"

PARTS = ("recording", "ledger", "evidence", "waste", "cost", "health", "exporter", "service")
"""In this order: what is recorded comes before what reads it."""

DCGM_GROUPS = (("recording", "gpu-workloads"), ("recording", "gpu-workloads-day"), ("waste", "gpu-waste"))
"""What judges, of the parts: the same for those who keep dcgm-exporter; dcgm-exporter.yaml makes what it reads."""

DCGM_LACKS = frozenset(
    {
        "workload:gpu_alerts_off_until_seconds:max",
        "workload:gpu_idle_for_seconds:min",
        "workload:gpu_age_seconds:max",
        "device:gpu_shared_idle:sum",
        "GPUSharedIdle",
        "GPUUnallocated",
    }
)
"""Rules on series that only the agent has."""

GROUPS = "groups:\n"

HEADER = """\
# Recording and alerting rules on the agent's own series; for Prometheus 2.42 or later, and vmalert 1.112 or later.
# Made from rules/src/*.yaml by scripts/rules.py; change those, then: make golden
# Every alert has a heading in docs/runbook.md and tests in tests/rules/: promtool test rules tests/rules/*.yaml
"""

DCGM_HEADER = """\
# Made from rules/src/*.yaml by scripts/rules.py; change those, then: make golden
"""

MUTE = "annotate its pods: gpu-cost-exporter/alerts=disabled"
"""Of the ways to mute, the one that kube-state-metrics can tell."""

MANIFEST_HEADER = """\
# Made from rules/src/*.yaml by scripts/rules.py; do not edit here.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpu-cost-exporter
spec:
"""


def indented(text: str, width: int) -> str:
    """Text with every line that is not empty moved to the right."""
    return "".join(f"{' ' * width}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def part(name: str) -> str:
    """The groups of one part, its head comment before them, as they stand below ``groups:``."""
    comment, groups = (SOURCE / f"{name}.yaml").read_text(encoding="utf-8").split(GROUPS, 1)
    return indented(comment, 2) + groups.rstrip() + "\n"


def joined() -> str:
    """The rules file: all parts, comments and all."""
    return HEADER + GROUPS + "\n".join(part(name) for name in PARTS if (SOURCE / f"{name}.yaml").is_file())


def group(part_name: str, name: str, without: frozenset[str]) -> str:
    """One group of a part, rules apart by empty lines, less those that are named."""
    groups = (SOURCE / f"{part_name}.yaml").read_text(encoding="utf-8").split(GROUPS, 1)[1]
    text = re.split(r"\n+(?=  (?:#|- name:))", groups)
    (found,) = (one for one in text if re.search(rf"^  - name: {name}$", one, flags=re.MULTILINE))
    head, rules = found.rstrip().split("    rules:\n", 1)
    kept = [rule for rule in rules.split("\n\n") if without.isdisjoint(re.findall(r"- (?:record|alert): (\S+)", rule))]
    return head + "    rules:\n" + "\n\n".join(kept) + "\n"


def for_dcgm_exporter() -> str:
    """The waste alerts on what dcgm-exporter and kube-state-metrics tell."""
    adapter = (SOURCE / "dcgm-exporter.yaml").read_text(encoding="utf-8")
    text = "\n".join([DCGM_HEADER + adapter, *(group(part, name, DCGM_LACKS) for part, name in DCGM_GROUPS)])
    return re.sub(r"annotate a pod\s+or the namespace: gpu-cost-exporter/alerts-until=<[^>]+>", MUTE, text)


def manifest(rules: str) -> str:
    """Wrap the text of a rules file as a PrometheusRule."""
    return MANIFEST_HEADER + indented(rules[rules.index(GROUPS) :], 2)


def outputs() -> dict[Path, str]:
    """What each generated file must hold."""
    rules = joined()
    return {RULES: rules, DCGM_RULES: for_dcgm_exporter(), MANIFEST: manifest(rules)}


def main() -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference."""
    differing = [
        path for path, text in outputs().items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv[1:]:
        for path in differing:
            path.write_text(outputs()[path], encoding="utf-8")
        return 0
    for path in differing:
        print(f"{path.relative_to(ROOT)} is not what rules/src gives; run: make golden")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
