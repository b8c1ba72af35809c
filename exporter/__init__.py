"""gpu-cost-exporter: who holds which GPU, how busy it is, and what that costs."""

__version__ = "0.1.0"
