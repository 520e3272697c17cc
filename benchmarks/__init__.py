"""Benchmarks: each one command, each pairing what is shared with doing it alone, in one run."""
