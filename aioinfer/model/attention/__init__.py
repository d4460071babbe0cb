"""Attention over paged KV: one interface, one pool, several kernels."""
