"""Updates: new weights for a loaded model."""
