"""Reads the kubelet and the Kubernetes API."""
