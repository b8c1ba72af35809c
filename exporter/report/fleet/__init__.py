"""A fleet's ledger, as Prometheus or the store of closed days has it, and what is made of it."""
