"""Names of pages by their content, under which stores and other processes know them.

The KV of a page depends on its tokens, on all tokens before them, and on what computed it. So a name is a
link of a chain of hashes, which begins with what all pages of one kind have in common::

    root ──► name of page 0 ──► name of page 1 ──► ...
             H(root, tokens)    H(name 0, tokens)

As in vLLM's block hashes and LMCache's keys; here the root has the arithmetic as well, so that bits are never
taken from another kind of processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

__all__ = ["extend_names", "root_of"]

_BYTES = 16


def root_of(parts: Iterable[str]) -> bytes:
    """The root of the names of all pages that have these texts in common; no two lists have the same one."""
    root = blake2b(digest_size=_BYTES, person=b"aioinfer pages 1")
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        root.update(len(encoded).to_bytes(8, "little") + encoded)
    return root.digest()


def extend_names(names: list[bytes], root: bytes, key: bytes, page_bytes: int) -> None:
    """Append the names of the pages that follow those of ``names``: ``key`` has their tokens, as
    :func:`~aioinfer.cache.radix.token_key` makes it, ``page_bytes`` bytes a page. About 1 us a page."""
    last = names[-1] if names else root
    for start in range(0, len(key) // page_bytes * page_bytes, page_bytes):
        last = blake2b(key[start : start + page_bytes], digest_size=_BYTES, key=last).digest()
        names.append(last)
