"""Which rows the next step computes. Pure Python: no torch, no asyncio, no clock of its own."""
