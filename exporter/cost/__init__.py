"""Turns recorded ledgers into money: reports, recommendations, budgets, exports and the store of closed days."""
