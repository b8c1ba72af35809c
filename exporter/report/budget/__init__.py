"""Budgets: how much a period may cost, what it has cost, and what it will."""
