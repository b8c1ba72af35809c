"""Reads GPUs through NVML and DCGM in child processes; merges their readings."""
