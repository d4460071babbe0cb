"""Speculation: drafts of the tokens that come next, and how many of them a step verifies."""
