"""A cloud's bill beside what was metered: the gap, explained line by line, to the cent."""

from exporter.report.reconcile.bill import Bill, Malformed, check_bills, read_bill
from exporter.report.reconcile.gap import RECONCILE_DIMENSIONS, reconcile
from exporter.report.reconcile.mapping import Mapping, read_mapping
from exporter.report.reconcile.values import Explanation, Group, Reconciliation
from exporter.report.reconcile.write import FORMATS, write_reconciliation

__all__ = (
    "FORMATS",
    "RECONCILE_DIMENSIONS",
    "Bill",
    "Explanation",
    "Group",
    "Malformed",
    "Mapping",
    "Reconciliation",
    "check_bills",
    "read_bill",
    "read_mapping",
    "reconcile",
    "write_reconciliation",
)
