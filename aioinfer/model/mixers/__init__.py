"""Mixers: the first halves of layers, in which the tokens of a sequence reach each other."""
