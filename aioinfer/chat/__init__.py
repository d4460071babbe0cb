"""Chats in OpenAI's form, without HTTP: messages, tools, response formats, and the parts of answers."""
