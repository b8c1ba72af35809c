"""The weekly digest: what GPUs cost, who moved, what was wasted, and what to do, for a mail or a chat."""
