"""The image formats of model families, one per file: the text of an image in a prompt, and its units."""
