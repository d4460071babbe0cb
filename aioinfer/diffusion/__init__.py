"""Diffusion language models: the choice of the tokens that are written into a block after each forward.

The package does not depend on scheduling, execution or asyncio, and importing it imports no torch.
"""
