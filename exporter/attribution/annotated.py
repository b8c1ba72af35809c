"""Shares that a scheduler wrote into a pod's annotations: HAMi and the plugins of volcano."""

from typing import Final

HAMI_DEVICES: Final = "hami.io/vgpu-devices-allocated"
HAMI_INSTANCES: Final = "hami.io/vgpu-mig-allocations"
VOLCANO_DEVICES: Final = "volcano.sh/vgpu-ids-new"
VOLCANO_INDEX: Final = "volcano.sh/gpu-index"
KEYS: Final = frozenset({HAMI_DEVICES, HAMI_INSTANCES, VOLCANO_DEVICES, VOLCANO_INDEX})
"""Annotations that are read."""
