"""Metrics: what an engine counts for Prometheus, recorded without it and rendered by it."""
