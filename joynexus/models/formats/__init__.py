"""Checkpoints of other projects: read, taken apart and put together again. Safe readers alone, never pickle."""
