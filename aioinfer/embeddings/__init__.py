"""Embeddings and scores: what becomes of pooled hidden states."""
