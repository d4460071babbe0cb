"""Resuming: a request that was interrupted goes on where it was, in this engine or another one.

``record`` is what an application stores, ``params_record`` the sampling parameters in it.
:mod:`aioinfer.loop.resumption` restores a request from it.
"""
