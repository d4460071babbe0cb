"""Adapters over a running engine, in this process: each imports its framework, and nothing imports them."""
