"""Filters that the kernels do not have, one per file: :class:`aioinfer.sampling.filters.FurtherFilter`."""
