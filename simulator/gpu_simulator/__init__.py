"""Simulates GPUs, drivers, engines, kubelets, API servers and fleets, for demonstrations and tests."""
