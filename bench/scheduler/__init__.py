"""``python -m bench scheduler``; see :mod:`bench.scheduler.command`."""
