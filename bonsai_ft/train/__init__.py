"""Training: memory plan, optimiser, loop, checkpoints, and what a run writes and prints."""
