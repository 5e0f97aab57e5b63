"""Checkpoints of an elastic state: for when all ranks die at once."""
