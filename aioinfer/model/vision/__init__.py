"""Image encoders: from the pixels of a unit to the vectors of its positions."""
