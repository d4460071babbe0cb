"""Benches: ``python -m bench NAME``. Each prints a table and one JSON line with versions and hardware.

A bench is a package ``bench.NAME`` whose module ``command`` is a :class:`~bench.command.Bench`.
"""
