"""Checkpoints: where a model comes from, and how its files are read."""
