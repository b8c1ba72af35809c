"""Attributes devices to holders and holders to owners."""
