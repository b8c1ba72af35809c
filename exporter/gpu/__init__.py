"""Reads GPUs through NVML and DCGM, in child processes that can be killed."""
