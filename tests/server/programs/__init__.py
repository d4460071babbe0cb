"""Programs of other libraries against a server, unpatched: each takes its address, and prints what it got.

They run with the Python of ``AIOINFER_CLIENTS_PYTHON``, or else with that of the tests; see
:mod:`tests.server.test_programs`.
"""
