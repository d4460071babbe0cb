"""Diffusion language models: which tokens of a block are written after which forward.

Nothing here knows of scheduling, execution or asyncio, and importing the package imports no torch.
"""
