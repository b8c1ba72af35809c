"""Serves HTTP: connections, access control, and the agent's page and API."""
