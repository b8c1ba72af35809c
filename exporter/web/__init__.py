"""Serves HTTP: connections, access, the agent's page and its API."""
