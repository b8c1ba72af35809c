"""Renders a snapshot as metrics, in the text formats of Prometheus and OpenMetrics."""
