"""Checkpoints of a training run."""
