"""Simulated environments, each in a process of its own."""
