"""Statistics and the timeline of an engine."""
