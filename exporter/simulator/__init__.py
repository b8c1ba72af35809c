"""Nodes and fleets that do not exist, for demo, documentation and tests."""
