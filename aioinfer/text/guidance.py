"""Grammars through llguidance (the extra ``aioinfer[structured]``): masks in microseconds, in Rust."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from aioinfer.errors import InvalidRequest
from aioinfer.text.costs import compiled_size, written_out
from aioinfer.text.grammar import Compiled, Matcher
from aioinfer.text.grammar_bounds import GrammarBounds
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.schema_rewrites import rewritten
from aioinfer.text.text_template import TextTemplate, lark_regex, lark_text

__all__ = ["GuidanceBackend", "json_options", "load_library"]

#: Models write white space between the parts; the bound prevents an output of nothing else.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
#: A name that is written by its numbers (``\u0061``) would pass for one that the schema does not know.
_BY_NAME = {**_OPTIONS, "json_allowed_escapes": 'nrbtf\\"'}
#: in the JSON of a schema, what may stand for a character that can only be written by its number
_CONTROL = re.compile(r"\\u00(?:[01]|7f)|\x7f|\\\\[xucv0]", re.IGNORECASE)

#: What a grammar forces can be unbounded, and llguidance computes it without a limit and with the GIL held;
#: for each token, it tokenizes all of it. Of several ``%llguidance`` lines the last one counts.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

#: Maximum Earley items of a position: what a schema of 500 optional properties needs at its start.
_WIDEST = 2000
#: The same for grammars that may be ambiguous. Their rows grow with the output, the time per token with the
#: square of that, and a token is accepted with the interpreter's lock held: 2 ms a character at 300. Schemas
#: within them may have more, by their parts, up to what 200 optional properties need.
_WIDEST_LARK, _PER_PART, _WIDEST_MIXED = 200, 4, 1000
#: maximum rules and characters of GBNF, which llguidance translates in Python: together they take 0.2 s
_MOST_GBNF_RULES, _MOST_GBNF = 500, 1 << 16
#: A line of Lark. llguidance's own test for it takes time that grows with the square of the blank lines.
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
#: Characters of a text, written out, that may be forced. A schema can repeat each of its texts 20,000 times.
_LONG = 1024
_LEAST = re.compile(r'"min(?:Length|Items|Properties)":\s*(?:[\d.]{4}|\de)')
#: what is between quotes, or within them
_TEXT = re.compile(r'(?:[^"\\]++|\\.)++', re.DOTALL)
#: bytes of states that are made in a second of a mask, at most
_GROWTH = 1 << 27
#: before the reason for which a schema within a grammar is refused
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")


def load_library() -> Any:
    """The module llguidance. Raises InvalidRequest if the extra is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest("grammar", "needs the extra: pip install 'aioinfer[structured]'") from error
    return llguidance


def json_options(schema: str) -> dict[str, str]:
    """Options for the grammar of a schema, by its JSON."""
    return _OPTIONS if _CONTROL.search(schema) else _BY_NAME


class GuidanceBackend:
    """llguidance for one tokenizer. Limits on fuel and size bound the duration of every call."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], *, max_depth: int
    ) -> None:
        """``tokenizer``: the JSON of a Hugging Face tokenizer, or a ``llguidance.TokenizerWrapper``;
        ``max_depth``: maximum nesting of every JSON schema, also of those within a grammar; recursion through
        ``$ref`` is not counted. Raises InvalidRequest if the extra is not installed."""
        self._library = llguidance = load_library()
        self._max_depth = max_depth
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        self.ends = frozenset(eos_token_ids)
        ids = filter(self._tokenizer.is_special_token, range(self._tokenizer.vocab_size))
        names = {self._tokenizer.decode_str([token]) for token in ids} - {""}
        #: texts of special tokens as they stand in a source that is rid of backslashes
        self._special = {_bare(each) for name in names for each in (name, json.dumps(name))}
        #: one executor per calling thread: a slow call does not delay the other threads
        self._executors = threading.local()
        self._spellings: dict[bytes, list[int]] | None = None

    def compile(self, grammar: Grammar) -> Compiled:
        bounds = GrammarBounds(self._max_depth)
        try:
            text = self._text(grammar, bounds)
        except json.JSONDecodeError as error:
            raise InvalidRequest("grammar", f"is not JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("grammar", "is nested too deeply") from None
        except ValueError as error:
            raise InvalidRequest("grammar", str(error)) from None
        widest = _WIDEST
        if grammar.kind == "lark":
            widest = min(_WIDEST_LARK + _PER_PART * bounds.parts, _WIDEST_MIXED)
        limits = self._library.LLParserLimits(
            max_items_in_row=widest,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest("grammar", _reason(matcher.get_error()))
        return _GuidanceMatcher(matcher, _Cost(compiled_size(text, bounds.parts)))

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        if not matchers:
            return
        table = np.zeros((len(matchers), len(masks[0])), np.int32)
        places, costs = [], set()
        for at, matcher in enumerate(cast("Sequence[_GuidanceMatcher]", matchers)):
            places.append((matcher.native, at))
            costs.add(matcher.cost)
        executor = getattr(self._executors, "executor", None)
        if executor is None:
            executor = self._executors.executor = self._library.LLExecutor(1)
        begin = time.thread_time()
        executor.unsafe_compute_mask_ptr(places, table.ctypes.data, table.shape[1] * 4, len(table))
        seconds = time.thread_time() - begin
        for cost in costs:
            cost.seconds += seconds
        for mask, row in zip(masks, table, strict=True):
            mask[:] = row

    def spellings(self) -> Mapping[bytes, Sequence[int]]:
        """The tokens that stand for these bytes in a text."""
        # Two threads may make it at once: it is the same.
        if (found := self._spellings) is None:
            known, found = self._tokenizer, {}
            for token in range(known.vocab_size):
                if not known.is_special_token(token) and (spelling := known.decode_bytes([token])):
                    found.setdefault(spelling, []).append(token)
            self._spellings = found
        return found

    def _text(self, grammar: Grammar, bounds: GrammarBounds) -> str:
        """The grammar as text for LLMatcher. Raises ValueError."""
        library = self._library.LLMatcher
        text: str
        grammar = grammar.behind("")
        match grammar.kind:
            case "json_schema":
                text = self._of_schema(json.loads(grammar.text), json_options(grammar.text), bounds)
            case "json_object":
                text = library.grammar_from_json_schema('{"type": "object"}', _OPTIONS)
            case "regex":
                bounds.check_patterns([grammar.text])
                text = library.grammar_from_regex(grammar.text)
                if written_out(grammar.text) > _LONG or self._unforced(grammar.text):
                    text = library.grammar_from_lark(f"start: {lark_regex(grammar.text)}{_NO_FORCING}")
            case "choice":
                choices = json.loads(grammar.text)
                if not isinstance(choices, list) or not choices or not all(map(_is_text, choices)):
                    raise ValueError("must be a non-empty list of non-empty texts")
                # One terminal: as many as there are choices would take the square of their number.
                lark = "start: CHOICE\nCHOICE: " + " | ".join(map(lark_text, choices))
                text = library.grammar_from_lark(lark + _NO_FORCING * self._unforced(lark))
            case "lark":
                bounds.check_lark(lark := _lark(grammar.text))
                text = library.grammar_from_lark(lark + _NO_FORCING)
            case "answer":
                # Builders write the rules, by recursion in Python: their depth has its limit.
                bounds.check_lark(grammar.text, rules=False)
                text = library.grammar_from_lark(grammar.text + _NO_FORCING * self._unforced(grammar.text))
            case "template":
                bounds.check_lark(lark := TextTemplate.read(grammar.text).lark())
                text = library.grammar_from_lark(lark + _NO_FORCING * self._unforced(lark))
        return text

    def _unforced(self, source: str) -> bool:
        """What the grammar forces is not to be looked for: it takes long, or llguidance, which tokenizes it,
        would take the text of a special token for that token."""
        bare = _bare(source)
        return _forces_much(source) or any(name in bare for name in self._special)

    def _of_schema(self, schema: Any, options: dict[str, str], bounds: GrammarBounds) -> str:
        """The grammar of a schema. Raises ValueError."""
        bounds.check_nesting(schema)
        if schema is False:
            raise ValueError("allows nothing")
        if schema is not True and not isinstance(schema, dict):
            raise ValueError("must be an object")
        exact = {} if schema is True else rewritten(schema)
        bounds.check_schema(exact)
        text: str
        own = exact.get("x-guidance")  # it may forbid white space, without which a text is forced to its end
        if own is None and not self._unforced(source := json.dumps(exact)):
            text = self._library.LLMatcher.grammar_from_json_schema(source, options)
        else:
            exact = {**exact, "x-guidance": {**options, **own} if isinstance(own, dict) else options}
            text = self._library.LLMatcher.grammar_from_lark(f"start: %json {json.dumps(exact)}{_NO_FORCING}")
        return text


@dataclass(slots=True, eq=False)
class _Cost:
    """What a grammar and the states of its copies take."""

    #: bytes of what was compiled
    size: int
    #: processor time of its masks, where its states are made
    seconds: float = 0.0


class _GuidanceMatcher:
    __slots__ = ("cost", "native")

    def __init__(self, native: Any, cost: _Cost) -> None:
        self.native = native
        self.cost = cost

    @property
    def size(self) -> int:
        return self.cost.size

    @property
    def grown(self) -> int:
        return int(self.cost.seconds * _GROWTH)

    def accept(self, token: int) -> bool:
        accepted: bool = self.native.consume_token(token)
        return accepted

    def advance(self, tokens: Sequence[int]) -> int:
        number: int = self.native.try_consume_tokens(tokens)
        return number

    @property
    def stopped(self) -> bool:
        stopped: bool = self.native.is_stopped()
        return stopped

    @property
    def error(self) -> str | None:
        return _first_line(self.native.get_error()) if self.native.is_error() else None

    def forced(self) -> list[int]:
        tokens: list[int] = self.native.compute_ff_tokens()
        return tokens

    def copy(self) -> Matcher:
        return _GuidanceMatcher(self.native.deep_copy(), self.cost)


def _lark(source: str) -> str:
    """Translate GBNF (llama.cpp; also accepted by vLLM and SGLang) to Lark; Lark is returned unchanged."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not source.strip():
        raise ValueError("is empty")
    if _IS_LARK.search(source):
        return source
    if len(source) > _MOST_GBNF:
        raise ValueError(f"has more than {_MOST_GBNF} characters of GBNF")
    if source.count("::=") > _MOST_GBNF_RULES:
        raise ValueError(f"has more than {_MOST_GBNF_RULES} rules of GBNF")
    try:
        text: str = gbnf_to_lark(source)
    except RecursionError:
        raise
    except Exception as error:  # it raises the bare Exception for rules that are missing
        raise ValueError(str(error)) from None
    return text


def _bare(text: str) -> str:
    return text.replace("\\", "").strip('"')


def _forces_much(text: str) -> bool:
    """The grammar may force a text that takes long to find and to tokenize. ``text``: its JSON or Lark."""
    texts = (found[0] for found in _TEXT.finditer(text))
    return _LEAST.search(text) is not None or any(written_out(each) > _LONG for each in texts)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _reason(message: str) -> str:
    """Why a grammar was refused, in the words of its author."""
    message = _PLACE.sub("", message)
    if message.startswith("oneOf"):
        return "the keyword 'oneOf' is not supported where its alternatives may overlap: use 'anyOf'"
    if message.startswith("Unknown format"):
        return f"the keyword 'format' is not supported with this value: {_first_line(message)}"
    lines = message.split("\n")
    if lines[0].startswith("regex parse error") and len(lines) > 1:
        return f"has a pattern that is not supported: {lines[1].strip()[:100]!r}: {lines[-1][:200]}"
    if lines[0].startswith("lookarounds"):
        return f"has a pattern that is not supported: {lines[0][:300]}"
    return _first_line(message)


def _first_line(message: str) -> str:
    """The first line of an llguidance error; the other lines dump the parser's state."""
    return message.split("\n", 1)[0][:300]
