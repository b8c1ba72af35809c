"""Where the money went: one node's ledger as a table, CSV or JSON."""
