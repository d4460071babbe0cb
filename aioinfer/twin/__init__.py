"""The twin: what an engine would do with a load and on a machine that are not here.

It is the engine itself, dispatcher and scheduler included, in virtual time: see :mod:`aioinfer.twin.running`.
"""
