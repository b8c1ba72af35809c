"""Writes the PrometheusRule of the deployment from the one rules file; ``--check`` only compares."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "rules" / "prometheus-rules.yaml"
TARGET = ROOT / "deploy" / "kustomize" / "base" / "prometheusrule.yaml"

HEADER = """\
# Made from rules/prometheus-rules.yaml by scripts/prometheus_rule.py; do not edit here.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpu-cost-exporter
spec:
"""


def manifest(rules: str) -> str:
    """Wrap the text of a rules file, comments and all, as a PrometheusRule."""
    body = rules[rules.index("groups:") :]
    return HEADER + "".join(f"  {line}" if line.strip() else line for line in body.splitlines(keepends=True))


def main() -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference."""
    wanted = manifest(RULES.read_text(encoding="utf-8"))
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is not what the rules file gives; run: make golden")
    return 1


if __name__ == "__main__":
    sys.exit(main())
