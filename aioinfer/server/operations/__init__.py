"""What those who run a server need of it: metrics."""
