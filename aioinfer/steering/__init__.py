"""Steering: what a program decides at each position of an output, before its token is sampled."""
