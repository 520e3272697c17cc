"""Benchmarks of the whole service on Ray: what a call costs, and a trace of tenants shared against isolated."""
