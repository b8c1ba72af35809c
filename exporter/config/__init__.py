"""Every option in one table, and how flags, environment and files are resolved."""

from exporter.config.options import AgentConfig
from exporter.config.resolve import load_agent, read_collectors, state_dir_problem

__all__ = ["AgentConfig", "load_agent", "read_collectors", "state_dir_problem"]
