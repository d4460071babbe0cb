"""Models: weights from disk, and the forward pass over packed rows and paged KV."""
