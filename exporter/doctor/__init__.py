"""Checks whether a node is ready for the agent, and reports what to fix."""
