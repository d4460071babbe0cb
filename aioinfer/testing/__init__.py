"""The same engine in virtual time: a simulated clock, and a toy device that catches every mix-up.

Shipped with the package, so that applications can test their own use of the engine without a model.
"""

from aioinfer.testing.toy import TaintError, ToyDevice, ToyTokenizer, toy_generate
from aioinfer.testing.virtual_launcher import TimedLauncher
from aioinfer.testing.virtual_time import Deadlock, VirtualLoop

__all__ = [
    "Deadlock",
    "TaintError",
    "TimedLauncher",
    "ToyDevice",
    "ToyTokenizer",
    "VirtualLoop",
    "toy_generate",
]
