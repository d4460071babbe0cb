"""Sampling: from logits to tokens, on the device. A row's token does not depend on the batch."""
