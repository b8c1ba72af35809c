"""Simulates GPUs, drivers, engines, kubelets, API servers and fleets, for demos and tests."""
