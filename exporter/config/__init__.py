"""Defines every option in one table, and resolves flags, environment and files."""

from exporter.config.options import AgentConfig
from exporter.config.resolve import load_agent, read_collectors, state_dir_problem

__all__ = ["AgentConfig", "load_agent", "read_collectors", "state_dir_problem"]
