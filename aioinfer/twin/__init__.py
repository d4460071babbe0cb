"""The same engine in virtual time: a simulated clock, and a toy device that catches every mix-up.

Shipped with the package, so that applications can test their own use of the engine without a model.
"""

from aioinfer.twin.clock import Deadlock, VirtualLoop
from aioinfer.twin.launcher import TimedLauncher
from aioinfer.twin.toy import TaintError, ToyDevice, ToyTokenizer, toy_generate

__all__ = [
    "Deadlock",
    "TaintError",
    "TimedLauncher",
    "ToyDevice",
    "ToyTokenizer",
    "VirtualLoop",
    "toy_generate",
]
