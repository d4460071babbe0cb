"""LoRA adapters of a model."""
