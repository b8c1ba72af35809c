"""Asks the kubelet and the Kubernetes API; all of their input and output is here."""
