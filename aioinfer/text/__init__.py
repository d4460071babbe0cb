"""Text: prompts into token ids, token ids into text, and where text stops."""
