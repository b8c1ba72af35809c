"""How a snapshot is shown: metrics, pages, JSON."""
