"""Every option in one table, and how flags, environment and files are resolved."""

from exporter.config.options import AgentConfig
from exporter.config.resolve import kubelet_socket_problem, load_agent, read_collectors

__all__ = ["AgentConfig", "kubelet_socket_problem", "load_agent", "read_collectors"]
