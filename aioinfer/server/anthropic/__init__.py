"""Anthropic's Messages endpoints."""
