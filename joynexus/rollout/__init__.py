"""Policy times environment gives trajectories."""
