"""``python -m bench diffusion``; see :mod:`bench.diffusion.command`."""

from bench.diffusion.command import main

__all__ = ["main"]
