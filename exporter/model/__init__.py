"""Immutable values that pass between the layers; no libraries."""
