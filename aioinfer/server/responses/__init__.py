"""OpenAI's Responses endpoint, without stored state."""
