"""Kernels for CPUs in C++, called without the interpreter's lock.

``source/`` holds them: plain functions over memory, without headers of Python or torch.
A wheel has them compiled (:mod:`~aioinfer.native.levels`, made by :mod:`~aioinfer.native.wheel`); elsewhere
:mod:`~aioinfer.native.build` compiles them on first use. :mod:`~aioinfer.native.bindings` calls them with the
arguments of :mod:`~aioinfer.native.arguments`, and :mod:`~aioinfer.native.tensors` checks tensors before
their addresses are taken. Models that use them are in :mod:`aioinfer.model`.
"""
