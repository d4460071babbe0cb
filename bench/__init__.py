"""Benches: ``python -m bench NAME``. Each prints a table and writes one JSON line."""
