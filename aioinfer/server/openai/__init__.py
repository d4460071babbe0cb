"""OpenAI's chat and completion endpoints: bodies become calls, results become JSON."""
