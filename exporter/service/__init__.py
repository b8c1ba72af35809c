"""The cost service: pages, API, budgets and metrics over the recorded ledgers of a fleet."""
