"""Images in prompts: what callers give, what the model's processor makes of it, and where it stands.

An image is a run of positions whose token ids are *words*: negative, and derived from the hash of what the
image is. See :mod:`aioinfer.images.prompt`.
"""
