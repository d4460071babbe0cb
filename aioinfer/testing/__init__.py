"""Tools for the tests of applications: an engine with scripted answers, an event loop in virtual time.

:mod:`aioinfer.testing.fixtures` is a plugin for pytest.
"""

from aioinfer.testing.fake import Answer, FakeEngine, FakeRequest
from aioinfer.testing.timed_launcher import TimedLauncher
from aioinfer.testing.virtual_time import Deadlock, VirtualLoop

__all__ = ["Answer", "Deadlock", "FakeEngine", "FakeRequest", "TimedLauncher", "VirtualLoop"]
