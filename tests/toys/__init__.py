"""Devices for tests that turn every mix-up of pages, slots, states or placeholders into an exact failure."""

from tests.toys.device import ToyDevice, toy_generate
from tests.toys.states import TaintError
from tests.toys.tokenizer import ToyTokenizer

__all__ = ["TaintError", "ToyDevice", "ToyTokenizer", "toy_generate"]
