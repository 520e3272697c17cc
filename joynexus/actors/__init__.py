"""Ray shells over the engines: placement, liveness, retries. No tensor math."""
