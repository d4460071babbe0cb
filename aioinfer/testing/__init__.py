"""For tests: an engine with scripted answers; the engine in virtual time, a simulated clock, and a toy device
that catches every mix-up.

Shipped with the package, so that applications can test their own use of the engine without a model.
:mod:`aioinfer.testing.fixtures` is a plugin for pytest.
"""

from aioinfer.testing.fake import Answer, FakeEngine, FakeRequest
from aioinfer.testing.toy import TaintError, ToyDevice, ToyTokenizer, toy_generate
from aioinfer.testing.virtual_launcher import TimedLauncher
from aioinfer.testing.virtual_time import Deadlock, VirtualLoop

__all__ = [
    "Answer",
    "Deadlock",
    "FakeEngine",
    "FakeRequest",
    "TaintError",
    "TimedLauncher",
    "ToyDevice",
    "ToyTokenizer",
    "VirtualLoop",
    "toy_generate",
]
