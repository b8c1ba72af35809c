"""The store of closed days: an SQLite file that keeps what Prometheus will forget."""

from exporter.report.store.closing import Closing, close_due_days, oldest_day
from exporter.report.store.combined import CombinedLedger
from exporter.report.store.days import DayStore
from exporter.report.store.ledger import StoreLedger
from exporter.report.store.values import ClosedDay, DayVersion

__all__ = [
    "ClosedDay",
    "Closing",
    "CombinedLedger",
    "DayStore",
    "DayVersion",
    "StoreLedger",
    "close_due_days",
    "oldest_day",
]
