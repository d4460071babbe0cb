"""Draft heads: small models that draft for a model from its hidden states."""
