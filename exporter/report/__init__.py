"""Where the money went: one node's ledger as a table, CSV or JSON."""

from exporter.report.agent_client import AgentAccess, base_address, fetch
from exporter.report.lines import BY
from exporter.report.node_report import NodeReport, read
from exporter.report.write import FORMATS, write

__all__ = ["BY", "FORMATS", "AgentAccess", "NodeReport", "base_address", "fetch", "read", "write"]
