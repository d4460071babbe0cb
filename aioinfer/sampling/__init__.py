"""Sampling: from logits to tokens, on the device, the same whatever else is in the batch."""
