"""Calls of an application: requests and what makes many of them, on any thread."""
