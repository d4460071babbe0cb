"""Kernels for CPUs in C++: compiled on the machine where they run, called without the interpreter's lock.

``source/`` holds them and knows neither Python nor torch: plain functions over memory.
:mod:`~aioinfer.native.build` compiles them when they are first wanted, :mod:`~aioinfer.native.bindings` calls
them. What they compute is wired to models in :mod:`aioinfer.model`.
"""
