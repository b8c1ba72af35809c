"""Nodes that do not exist: driver, kubelet and processes from one scenario, for demo, documentation and tests."""
