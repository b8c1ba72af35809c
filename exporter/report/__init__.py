"""Where the money went: of one node by its agent's ledger, of a fleet by what Prometheus has recorded."""

from exporter.report.agent_client import AgentAccess, base_address, fetch
from exporter.report.lines import BY, label_keys
from exporter.report.node_report import NodeReport, read
from exporter.report.write import FORMATS, write

__all__ = ["BY", "FORMATS", "AgentAccess", "NodeReport", "base_address", "fetch", "label_keys", "read", "write"]
