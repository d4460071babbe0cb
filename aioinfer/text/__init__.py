"""Text: tokenizing, detokenizing, stop strings, grammars, and parsers of reasoning and tool calls."""

__all__ = ["AUTO"]

#: in place of a parser's name: the one that fits the chat template
AUTO = "auto"
