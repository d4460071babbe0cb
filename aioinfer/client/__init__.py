"""What an application calls: requests and what makes many of them, on any thread."""
