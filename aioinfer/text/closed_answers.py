"""Closed answers: grammars that allow some texts and no others, as an automaton of tokens.

A state is what has been written of a text, a node of the trie of the texts' bytes. A token leads from a node
to another where its bytes do, so every tokenization of a text is a path::

    "yes", "yet"        ∙ ──y──► ∙ ──e──► ∙ ──s──► yes ──end──► ended
                        │                 └──t──► yet
                        └────────ye───────►
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.text.grammar_spec import Grammar

__all__ = ["ClosedAnswers", "closed_texts"]

#: Maximum bytes of all texts, nodes, and tokens that lead from one to another: a search looks at all of them
#: for each position of a block. What is larger is a grammar like others.
_MOST_BYTES, _MOST_NODES, _MOST_EDGES = 1 << 16, 1 << 12, 1 << 13
#: keywords of a schema that allow and forbid nothing
_NOTES = {"title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated"}
_NOTES |= {"$schema", "$id", "$comment", "$anchor"}
_WORDS: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
#: no integer beyond is written with its digits by everybody
_EXACT = 1 << 53


def closed_texts(grammar: Grammar) -> list[str] | None:
    """The texts of a grammar that was compiled, if they are few: choices, and a JSON schema of nothing but
    ``enum``, ``const``, ``boolean`` and ``null``, also as ``anyOf``; None for others."""
    if grammar.kind == "choice":
        texts: list[str] | None = json.loads(grammar.text)
    elif grammar.kind == "json_schema" and len(grammar.text) <= _MOST_BYTES:
        texts = _texts(json.loads(grammar.text))
    else:
        return None
    if not texts or sum(map(len, texts)) > _MOST_BYTES:
        return None
    return list(dict.fromkeys(texts))


def _texts(schema: Any) -> list[str] | None:
    if not isinstance(schema, dict):
        return None
    rest = {name: value for name, value in schema.items() if name not in _NOTES}
    kind = rest.pop("type", None)
    if rest.keys() == {"enum"} and isinstance(rest["enum"], list):
        return _written(rest["enum"], kind)
    if rest.keys() == {"const"}:
        return _written([rest["const"]], kind)
    if rest.keys() == {"anyOf"} and kind is None and isinstance(rest["anyOf"], list):
        found = [_texts(option) for option in rest["anyOf"]]
        return None if None in found else [text for texts in found for text in texts or ()]
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    if rest or not all(isinstance(name, str) and name in _WORDS for name in kinds):
        return None
    return _written([value for name in kinds for value in _WORDS[name]], None)


def _written(values: Sequence[Any], kind: Any) -> list[str] | None:
    """The JSON of values, of those with this ``type``."""
    kinds = kind if isinstance(kind, list) else [kind]
    texts = []
    for value in values:
        own = _kinds(value)
        if own is None:
            return None
        if kind is None or not own.isdisjoint(kinds):
            # llguidance writes DEL by its number.
            texts.append(json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f"))
    return texts


def _kinds(value: Any) -> set[str] | None:
    """The types that a value has; None for one that can be written in more than one way."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"} if abs(value) < _EXACT else None
    return {"string"} if isinstance(value, str) else None


@dataclass(frozen=True, slots=True, eq=False)
class ClosedAnswers:
    """The automaton of some texts. State ``ended`` follows the token that ends an output, state 0 is its
    start; E transitions in the order of their targets."""

    #: [E] each: states, and the index of the token in ``tokens``
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    #: [T], in rising order
    tokens: npt.NDArray[np.int64]
    #: [states]: the fewest tokens to the end of a text, and to that of the output
    left: npt.NDArray[np.float64]
    until_ended: npt.NDArray[np.float64]
    #: by state, the state that each token leads to
    steps: Sequence[Mapping[int, int]]

    @property
    def ended(self) -> int:
        return len(self.left) - 1

    @property
    def least(self) -> int:
        """The fewest tokens of an answer."""
        return int(self.left[0])

    @classmethod
    def build(
        cls,
        texts: Iterable[str],
        spellings: Mapping[bytes, Sequence[int]],
        ends: Iterable[int],
        stops: Collection[int] = (),
    ) -> ClosedAnswers | None:
        """``spellings``: the tokens that stand for these bytes; ``ends``: those of the model that end an
        output; ``stops``: tokens that end it with their own text, which must complete an answer. None if the
        automaton would be too large, or if no text can be written with the tokens."""
        trie = _trie(texts)
        if trie is None:
            return None
        children, whole = trie
        ended, longest = len(children), max(map(len, spellings), default=0)
        steps: list[dict[int, int]] = [{} for _ in range(ended + 1)]
        left, until_ended = np.full((2, ended + 1), np.inf)
        left[ended] = until_ended[ended] = edges = 0
        # Backwards: children come after their parents.
        for node in range(ended - 1, -1, -1):
            step = steps[node]
            for token, child in _leading(children, node, spellings, longest):
                if left[child] < np.inf and (whole[child] or token not in stops):
                    step[token] = ended if token in stops else child
                    left[node] = min(left[node], left[child] + 1)
            if whole[node]:
                left[node] = 0
                step.update(dict.fromkeys(ends, ended))
            until_ended[node] = 1 + min((until_ended[each] for each in step.values()), default=np.inf)
            edges += len(step)
            if edges > _MOST_EDGES:
                return None
        if left[0] == np.inf:
            return None
        triples = sorted(
            (target, source, token) for source, step in enumerate(steps) for token, target in step.items()
        )
        columns = np.asarray(triples, np.int64).reshape(-1, 3).T
        tokens, column = np.unique(columns[2], return_inverse=True)
        return cls(columns[1], columns[0], column.reshape(-1), tokens, left, until_ended, steps)


def _trie(texts: Iterable[str]) -> tuple[list[dict[int, int]], list[bool]] | None:
    """By node, its children by their bytes, and whether a text ends there. The root is node 0."""
    children: list[dict[int, int]] = [{}]
    whole = [False]
    for text in texts:
        node = 0
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return None
        for byte in encoded:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                whole.append(False)
                if len(children) > _MOST_NODES:
                    return None
            node = children[node][byte]
        whole[node] = True
    return children, whole


def _leading(
    children: list[dict[int, int]], node: int, spellings: Mapping[bytes, Sequence[int]], longest: int
) -> Iterable[tuple[int, int]]:
    """The tokens that lead from a node to another, and that one."""
    open_ = [(b"", node)]
    while open_:
        before, at = open_.pop()
        for byte, child in children[at].items():
            spelling = before + bytes((byte,))
            for token in spellings.get(spelling, ()):
                yield token, child
            if len(spelling) < longest:
                open_.append((spelling, child))
