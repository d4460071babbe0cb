"""OpenAI's Responses endpoint."""
