"""Runs the agent of a node: starts its parts, ticks, serves and stops."""

from exporter.agent.run import run

__all__ = ["run"]
