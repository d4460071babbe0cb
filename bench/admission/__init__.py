"""``python -m bench admission``; see :mod:`bench.admission.command`."""
