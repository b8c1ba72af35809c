"""gpu-cost-exporter: the holder, activity and cost of each GPU."""

__version__ = "0.1.0"
