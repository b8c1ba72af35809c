"""The cost service: pages, API, budgets and metrics of a fleet."""
