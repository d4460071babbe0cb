"""Adapters: one module a library, run in the library's own environment, importing nothing of aioinfer.

``python -m bench.peers.adapters.NAME`` speaks :mod:`~bench.peers.adapters.protocol` on stdin and stdout.
"""
