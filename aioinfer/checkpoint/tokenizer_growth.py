"""How much longer a tokenizer's own rules make a text: forty that double it would take all memory.

``tokenizers`` applies them when it reads the file already, to the tokens that were added.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.regular import read_regular
from aioinfer.checkpoint.tensors import MOST_JSON
from aioinfer.errors import ConfigError, why

__all__ = ["check_growth"]

#: Times that a text may become longer. T5's becomes 66 times longer, if it is one ligature of Arabic. The
#: decompositions of Unicode, 18 times at most, do not add up.
_MOST = 1000


def check_growth(file: Path) -> None:
    """Raise ConfigError if a normalizer or decoder of a tokenizer.json can make a text far longer."""
    import msgspec

    class _Whole(msgspec.Struct):
        # The rest, a vocabulary with its merges, is not kept.
        normalizer: Any = None
        decoder: Any = None

    try:
        whole = msgspec.json.decode(read_regular(file, MOST_JSON), type=_Whole)
        growths = {
            name: math.prod(map(_growth, _rules(getattr(whole, name)))) for name in ("normalizer", "decoder")
        }
    except (OSError, ValueError, TypeError, RecursionError) as error:  # also msgspec's
        raise ConfigError(f"model: {file.name} cannot be read: {why(error)}") from error
    for name, growth in growths.items():
        if growth > _MOST:
            made = f"can make a text {growth:g} times longer"
            raise ConfigError(f"model: the {name} in {file.name} {made}; {_MOST} are the most")


def _rules(rule: Any) -> Iterator[dict[str, Any]]:
    """A rule and those within it."""
    level = [rule]
    while level:
        each = level.pop()
        if isinstance(each, list):
            level += each
        elif isinstance(each, dict):
            yield each
            level += [each.get("normalizers"), each.get("decoders")]


def _growth(rule: dict[str, Any]) -> float:
    match rule.get("type"):
        case "Replace":
            content, pattern = rule.get("content"), rule.get("pattern")
            text = pattern.get("String") if isinstance(pattern, dict) else pattern
            made = len(content) if isinstance(content, str) else 0
            # An expression, or an empty text, can be found before every character.
            return max(1.0, made / len(text)) if isinstance(text, str) and text else 1.0 + made
        case "Precompiled":
            return _precompiled(rule.get("precompiled_charsmap"))
    return 1.0


def _precompiled(given: Any) -> float:
    """The longest text that stands for a character in SentencePiece's map: behind a trie, each before a 0."""
    if not given:
        return 1.0
    content = base64.b64decode(given)
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return float(max(map(len, texts), default=1)) or 1.0
