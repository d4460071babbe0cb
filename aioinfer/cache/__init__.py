"""Ownership of KV pages and slots. Pure Python: no torch, no asyncio."""
