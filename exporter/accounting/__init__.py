"""Computes activity, idle time, metered seconds, energy and money from readings and holders, and stores the ledger."""
