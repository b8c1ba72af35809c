"""What a user may set, and how it is read: one table of options, and the settled ``AgentConfig``."""

from exporter.config.paths import kubelet_socket_problem, read_collectors
from exporter.config.resolve import AgentConfig, load_agent

__all__ = ["AgentConfig", "kubelet_socket_problem", "load_agent", "read_collectors"]
