"""Metrics, for operators of a server."""
