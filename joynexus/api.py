"""The in-cluster Python API."""
