"""HTTP without models: connections, bodies, limits, access, events, failures."""
