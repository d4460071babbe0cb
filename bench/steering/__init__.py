"""The steering bench: logits processors, forks and searches; see :mod:`bench.steering.command`."""
