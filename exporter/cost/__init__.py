"""Turns recorded ledgers into money: reports, advice, budgets, exports, the store of closed days."""
