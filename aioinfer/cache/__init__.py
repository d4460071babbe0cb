"""Who owns which KV page and which slot. Pure Python: no torch, no asyncio."""
