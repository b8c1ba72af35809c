"""Every option in one table, and how flags, environment and files are resolved."""

from exporter.config.paths import kubelet_socket_problem, read_collectors
from exporter.config.resolve import AgentConfig, load_agent

__all__ = ["AgentConfig", "kubelet_socket_problem", "load_agent", "read_collectors"]
