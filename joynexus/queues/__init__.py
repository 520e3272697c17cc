"""The training queue and the inference batcher."""
