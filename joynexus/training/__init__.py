"""The training engine: slots, learners, checkpoints and the prefix store. No Ray."""
