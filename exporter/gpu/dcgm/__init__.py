"""Reads GPUs through NVIDIA's data centre GPU manager, DCGM."""
