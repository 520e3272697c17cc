"""Offline datasets, their statistics and the order in which they are sampled."""
