"""The per-node agent: starts its parts, ticks, serves, and ends cleanly."""

from exporter.agent.run import run

__all__ = ["run"]
