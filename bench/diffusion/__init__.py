"""``python -m bench diffusion``; see :mod:`bench.diffusion.command`."""
