"""Reads GPUs through NVIDIA's management library, NVML."""
