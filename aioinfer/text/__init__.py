"""Text: tokenizing, detokenizing, stop strings, grammars, and parsers of reasoning and tool calls."""
