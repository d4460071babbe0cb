"""Grammars that cost much while they run end alone; what all grammars need is there before the first one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import llguidance
import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.parallel.dispatcher import Dispatcher
from aioinfer.params import Grammar, SamplingParams
from tests.engine.simulation import settle

AMBIGUOUS = {
    "pairs": 'start: s\ns: s s | "a" | "b" | "ab"',
    "palindromes": 'start: s\ns: "a" s "a" | "b" s "b" | "a" | "b" | s s',
    "empty parts": 'start: s\ns: s s s | "a" | ""',
    "lists of lists": 'start: a*\na: b* "b" | "b"\nb: "b"+',
    "padded": 'start: s\ns: s s | "a" | "b" | never\nnever: ' + " | ".join(f'"c" "{at}"' for at in range(90)),
    "gbnf": 'root ::= s\ns ::= s s s | s s | "a" | "b"',
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_grammar_ends_alone(name: str) -> None:
    plain = SamplingParams(seed=1, max_tokens=300, ignore_eos=True)
    async with Engine(EngineConfig(threads=1)) as engine:
        ends = dict.fromkeys(engine.info.eos_token_ids, -100.0)
        grammar = Grammar("lark", AMBIGUOUS[name])
        params = SamplingParams(seed=1, max_tokens=300, grammar=grammar, logit_bias=ends)
        expected = await engine.generate("ab", plain)
        bad, good = engine.generate("ab", params), engine.generate("ab", plain)
        with pytest.raises(errors.ConstraintFailed, match=r"grammar: .* max is \d+"):
            await bad
        assert (await good).token_ids == expected.token_ids
        await settle(engine)


class Counted:
    """Makes ``LLTokenizer`` note the threads that build one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        make = llguidance.LLTokenizer

        def counted(*arguments: Any, **named: Any) -> Any:
            self.threads.append(threading.current_thread())
            return make(*arguments, **named)

        monkeypatch.setattr(llguidance, "LLTokenizer", counted)


@pytest.mark.parametrize("dispatched", [False, True])
async def test_the_tokenizer_of_grammars_is_built_at_the_start(
    monkeypatch: pytest.MonkeyPatch, dispatched: bool
) -> None:
    built = Counted(monkeypatch).threads
    config = EngineConfig(threads=1)
    async with Dispatcher([Engine(config)]) if dispatched else Engine(config) as engine:
        at_start = list(built)
        assert len(at_start) == 1 + dispatched
        assert threading.main_thread() not in at_start
        constrained = SamplingParams(max_tokens=4, grammar=Grammar("choice", ["yes", "no"]))
        banned = SamplingParams(max_tokens=4, bad_words=("yes",), logprobs=2)
        await asyncio.gather(engine.generate("x", constrained), engine.generate("x", banned))
        assert built == at_start


async def test_an_engine_starts_whose_tokenizer_no_grammar_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise ValueError("can't determine decoder type")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    async with Engine(EngineConfig(threads=1)) as engine:
        assert (await engine.generate("x", SamplingParams(max_tokens=2))).token_ids
        with pytest.raises(errors.AioInferError, match="decoder type"):
            await engine.generate("x", SamplingParams(grammar=Grammar("choice", ["yes"])))


def test_no_first_request_of_a_kind_imports_on_the_loop() -> None:
    """In a process of its own, where nothing is imported yet."""
    code = """
import asyncio, sys
from aioinfer import Engine, EngineConfig, Grammar, SamplingParams
async def main():
    async with Engine(EngineConfig(threads=1, tool_call_parser="hermes")) as engine:
        before = set(sys.modules)
        short, chat = SamplingParams(max_tokens=2, logprobs=2), [{"role": "user", "content": "x"}]
        await engine.generate("x", short)
        await engine.generate("x", short.changed(grammar=Grammar("choice", ["yes"])))
        await engine.chat(chat, short, response_format={"type": "json_object"})
        await engine.embed(["x"])
        print({each.split(".")[0] for each in set(sys.modules) - before} & {"pydantic", "llguidance"})
asyncio.run(main())
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout == "set()\n"
