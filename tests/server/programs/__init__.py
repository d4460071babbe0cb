"""Programs of other libraries against a server, unpatched: each takes its address and the directory of its
model, and prints what it got.

They run in environments of their own (:mod:`tests.server.programs.environments`); see
:mod:`tests.server.test_programs`.
"""
