"""Updates: other weights for a model that is loaded, in place of those that it has."""
