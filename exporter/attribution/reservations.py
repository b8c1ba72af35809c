"""Fractions of a GPU that a pod holds on behalf of others: KAI and Run:ai."""

from typing import Final

FRACTION: Final = "gpu-fraction"
MEMORY: Final = "gpu-memory"
DEVICES: Final = "gpu-fraction-num-devices"
CONTAINER: Final = "gpu-fraction-container-name"
KEYS: Final = frozenset({FRACTION, MEMORY, DEVICES, CONTAINER})
"""Annotations that are read."""
GROUP: Final = "runai-gpu-group"
"""Label of the pod that holds the GPU and of those who have fractions of it; with several GPUs, ``<this>/<group>``."""
LABEL_KEYS: Final = frozenset({GROUP})
"""Labels that are read, and those that begin with one of them and a slash."""
