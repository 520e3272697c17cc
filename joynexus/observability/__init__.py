"""Typed metrics, their sinks, the usage ledger and logs."""
