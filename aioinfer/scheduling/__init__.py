"""Who computes what in the next step. Pure Python: no torch, no asyncio, no clock of its own."""
