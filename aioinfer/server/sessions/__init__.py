"""Sessions over HTTP: conversations whose KV is held between requests."""
