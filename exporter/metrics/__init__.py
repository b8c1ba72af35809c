"""Turns a snapshot into metrics in the text formats of Prometheus and OpenMetrics."""
