"""What a user may set, and how it is read: one table of options, and the settled ``AgentConfig``."""

from exporter.config.agent_config import AgentConfig
from exporter.config.load import load_agent
from exporter.config.paths import kubelet_socket_problem, read_collectors

__all__ = ["AgentConfig", "kubelet_socket_problem", "load_agent", "read_collectors"]
