"""How a snapshot is shown - metrics, pages, JSON - and who may see it, how many at a time."""
