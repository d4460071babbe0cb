"""Model families: from a config and a checkpoint to layers."""
