"""Adapters: low-rank changes of a model's linear layers (LoRA, arXiv 2106.09685), several in one batch."""
