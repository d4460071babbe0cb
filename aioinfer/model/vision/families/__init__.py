"""Image encoders of model families, one per file."""
