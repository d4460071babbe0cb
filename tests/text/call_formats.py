"""The formats of tool calls: how their models write calls, and texts that are nearly calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from aioinfer.text.tool_calls import PARSERS, Parsed

__all__ = ["FORMATS", "MARK", "SCHEMAS", "CallFormat", "Calls", "collect", "cut", "parse", "written"]

#: a character that belongs to no format
MARK = "§"
Calls = list[tuple[str, str]]
_PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "map": {"type": "object"},
    "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]},
}
#: the functions that the parsers know
SCHEMAS: dict[str, Any] = {name: {"type": "object", "properties": _PROPERTIES} for name in ("f", "g")}


@dataclass(frozen=True)
class CallFormat:
    """
    Attributes:
        tell: a call as its models write it; keywords are those of ``json.dumps``.
        frame: the characters that may belong to a call besides its name and its arguments.
        pieces: parts of calls.
        begin, between, end: what encloses several calls.
        alone: the beginning of the text decides whether it has calls.
    """

    tell: Callable[..., str]
    frame: str
    pieces: tuple[str, ...]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    alone: bool = False


def _hermes(name: str, arguments: Any, **how: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, **how)}}}\n</tool_call>'


def _llama(name: str, arguments: Any, **how: Any) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, **how)}}}'


def _mistral(name: str, arguments: Any, **how: Any) -> str:
    return f'{{"name": "{name}", "arguments": {json.dumps(arguments, **how)}}}'


def _mistral_v11(name: str, arguments: Any, **how: Any) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, **how)}"


def _qwen3_coder(name: str, arguments: Any, **how: Any) -> str:
    """Values as the template writes them: other values than lists and objects as Python does."""
    told = [
        f"<parameter={key}>\n{json.dumps(value, **how) if isinstance(value, (list, dict)) else value}\n"
        "</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(told)}</function>\n</tool_call>"


def _seed_oss(name: str, arguments: Any, **how: Any) -> str:
    told = [f"<parameter={key}>{_raw(value, **how)}</parameter>\n" for key, value in arguments.items()]
    return f"<seed:tool_call>\n<function={name}>\n{''.join(told)}</function>\n</seed:tool_call>"


def _glm45(name: str, arguments: Any, **how: Any) -> str:
    told = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value, **how)}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(told)}</tool_call>"


def _minimax_m2(name: str, arguments: Any, **how: Any) -> str:
    told = [f'<parameter name="{key}">{_raw(value, **how)}</parameter>\n' for key, value in arguments.items()]
    return f'<invoke name="{name}">\n{"".join(told)}</invoke>'


def _dsml(name: str, arguments: Any, **how: Any) -> str:
    told = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{_raw(value, **how)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{told}</｜DSML｜invoke>'


def _raw(value: Any, **how: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, **how)


def _harmony(name: str, arguments: Any, **how: Any) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + json.dumps(arguments, **how)


def _gemma4(name: str, arguments: Any, **_: Any) -> str:
    pairs = ",".join(f"{key}:{_gemma4_value(value)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"


def _gemma4_value(value: Any) -> str:
    """As the template writes it, but for keys that need quotation marks."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma4_value, value))}]"
        case dict():
            told = (f'<|"|>{key}<|"|>:{_gemma4_value(each)}' for key, each in value.items())
            return f"{{{','.join(told)}}}"
        case bool():
            return "true" if value else "false"
    return str(value)


def _deepseek_v3(name: str, arguments: Any, **how: Any) -> str:
    told = f"{name}\n```json\n{json.dumps(arguments, **how)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{told}<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: Any, **how: Any) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, **how)}<｜tool▁call▁end｜>"


def _kimi(name: str, arguments: Any, **how: Any) -> str:
    told = json.dumps(arguments, **how)
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{told}<|tool_call_end|>"


def _python(name: str, arguments: Any, **how: Any) -> str:
    """In Python's notation, or with JSON's literals."""
    as_json = how.get("ensure_ascii", True)
    told = (f"{key}={json.dumps(each, **how) if as_json else repr(each)}" for key, each in arguments.items())
    return f"{name}({', '.join(told)})"


_JSON = (
    "{}", "{}}", "{", "}", "[", "]", '"', "\\", ",", ":", '"a": 1', '{"a": "', '"name":', "\n", " ", MARK,
)  # fmt: skip
#: of values in Python's notation, which become JSON
_PYTHON_FRAME = "'None,"
_CODER = (
    "<function=", "<function=f>", "f>", "</function>", "<parameter=text>", "<parameter=count>",
    "<parameter=map>", "<parameter=", "</parameter>", "</para", "12", "null", "['a', None]", *_JSON,
)  # fmt: skip
#: what models write otherwise
_SHAPES = (
    '{"type": "function", "function": {"name": "f", "arguments": {', '{"id": "a", ', '{"name": "f"}',
    '"arguments": "{}"', '"parameters": null', '{"name": "g", "arguments": "{\\"a\\": \\"', '\\"}"}',
    "```json\n", "```", *_JSON,
)  # fmt: skip
_SHAPES_FRAME = '{"name": , "arguments": , "parameters": null, "type": "function"}[]`json\\\n '
_MISTRAL = (
    "[TOOL_CALLS]", "[TOOL_CALLS][", '{"name": "f", "arguments": {', '{"arguments": {"a": "',
    '"}, "name": "g"}', ', "id": "a1B2c3D4e"}', "f", "[CALL_ID]a1B", "[ARGS]{", "[ARGS", "TOOL_CALLS]",
    "}}, ", "}}]", *_SHAPES,
)  # fmt: skip
_MISTRAL_FRAME = f"[TOOL_CALLS][CALL_ID]a1B2c3D4e[ARGS]{_SHAPES_FRAME}"

_DEEPSEEK_FRAME = "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json<｜tool▁call▁end｜>|_ \n null"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", "<｜tool▁call▁begin｜>g<｜tool▁sep｜>",
    "<|tool_call_begin|>", "function", "<｜tool▁sep｜>", "f", "```json", "\n```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "tool▁call", "<｜", "null", "}}", *_JSON,
)  # fmt: skip

_DSML_FRAME = (
    f'<｜DSML｜function_calls>/<｜DSML｜invoke name="">/<｜DSML｜parameter string="true">\n {_PYTHON_FRAME}'
)
_DSML = (
    "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">',
    "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="', 'f">',
    '<｜DSML｜invoke name="g">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="text" string="true">',
    '<｜DSML｜parameter name="count" string="false">', '<｜DSML｜parameter name="map">',
    '<｜DSML｜parameter name="', "</｜DSML｜parameter>", "</｜DSML｜pa", "12", "null", "['a', None]", *_JSON,
)  # fmt: skip

FORMATS = {
    "hermes": CallFormat(
        _hermes, f"<tool_call>/{_SHAPES_FRAME}",
        ("<tool_call>", "</tool_call>", '\n{"name": "f", "arguments": {', '{"arguments": {"a": "',
         '"}, "name": "g"}', '"arguments"', "tool_call>", "<", *_SHAPES),
    ),
    **{
        name: CallFormat(
            _mistral, begin + end + _SHAPES_FRAME,
            (begin, end, f"{begin}[", '{"name": "f", "arguments": {', '{"arguments": {"a": "',
             '"}, "name": "g"}', "}}, ", f"}}}}]{end}", end[2:], *_SHAPES),
            begin=f"{begin}[", between=", ", end=f"]{end}",
        )
        for name, begin, end in (
            ("granite", "<|tool_call|>", ""),
            ("apriel", "<tool_calls>", "</tool_calls>"),
            ("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
            ("functools", "functools", ""),
        )
    },
    "qwen3-coder": CallFormat(
        _qwen3_coder, f"<tool_call>/<function=></parameter=>\n {_PYTHON_FRAME}",
        ("<tool_call>", "<tool_call>\n<function=f>", "</tool_call>", *_CODER),
    ),
    "seed-oss": CallFormat(
        _seed_oss, f"<seed:tool_call>/<function=></parameter=>\n {_PYTHON_FRAME}",
        ("<seed:tool_call>", "<seed:tool_call>\n<function=f>", "</seed:tool_call>", *_CODER),
    ),
    "glm45": CallFormat(
        _glm45, f"<tool_call>/<arg_key></arg_value>\n {_PYTHON_FRAME}",
        ("<tool_call>", "<tool_call>f\n", "</tool_call>", "g", "<arg_key>text</arg_key>\n<arg_value>",
         "<arg_key>count</arg_key><arg_value>", "<arg_key>map</arg_key>\n<arg_value>", "<arg_key>", "text",
         "</arg_key>", "<arg_value>", "</arg_value>", "</arg_", "12", "null", "['a', None]", *_JSON),
    ),
    "minimax-m2": CallFormat(
        _minimax_m2, f'<minimax:tool_call>/<invoke name="">/<parameter name="">\n {_PYTHON_FRAME}',
        ("<minimax:tool_call>", '<minimax:tool_call>\n<invoke name="f">', "</minimax:tool_call>",
         '<invoke name="', '<invoke name="g">', 'f">', "</invoke>", '<parameter name="text">',
         '<parameter name="count">', '<parameter name="map">', '<parameter name="', "</parameter>", "</para",
         "12", "null", "['a', None]", *_JSON),
        begin="<minimax:tool_call>\n", end="\n</minimax:tool_call>",
    ),
    # None stands for null.
    "gemma4": CallFormat(
        _gemma4, '<|tool_call>call:{}<tool_call|><|"|>,\n None',
        ("<|tool_call>", "<|tool_call>call:f{", "<tool_call|>", "call:f", '<|"|>', "<|", "text:", "a:12",
         "a:x<y", "},", "},b:[", "true", "None", *_JSON),
        between="",
    ),
    "mistral": CallFormat(
        _mistral, _MISTRAL_FRAME, _MISTRAL, begin="[TOOL_CALLS][", between=", ", end="]",
    ),
    "mistral-v11": CallFormat(_mistral_v11, _MISTRAL_FRAME, _MISTRAL, between=""),
    "llama3": CallFormat(
        _llama, f"<|python_tag|>;{_SHAPES_FRAME}",
        ("<|python_tag|>", "python_tag|>", ";", '{"name": "f", "parameters": {', '{"arguments": {"a": "',
         '{"type": "function", "name": "f", "parameters": {"', '"}, "name": "g"}', "}}; ", '"parameters"',
         '{"name": "f", "parameters": {}}', '{"name": "h", "parameters": {', *_SHAPES),
        between="; ", alone=True,
    ),
    "harmony": CallFormat(
        _harmony,
        "<|start|>assistant<|channel|>commentary to=functions. <|constrain|>json<|message|><|call|><|end|>\n"
        '",:1',
        ("<|start|>", "<|start|>assistant", "<|channel|>",
         "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{",
         "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>",
         "<|channel|>analysis<|message|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "assistant",
         "commentary", " to=f", "json", "<|", "}}", *_JSON),
        between="<|call|><|start|>assistant",
    ),
    "deepseek-v3": CallFormat(
        _deepseek_v3, _DEEPSEEK_FRAME, _DEEPSEEK, begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v31": CallFormat(
        _deepseek_v31, _DEEPSEEK_FRAME, _DEEPSEEK,
        begin="<｜tool▁calls▁begin｜>", between="", end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v32": CallFormat(
        _dsml, _DSML_FRAME, _DSML, begin="<｜DSML｜function_calls>\n", end="\n</｜DSML｜function_calls>",
    ),
    "deepseek-v4": CallFormat(
        _dsml, _DSML_FRAME, _DSML, begin="<｜DSML｜tool_calls>\n", end="\n</｜DSML｜tool_calls>",
    ),
    "kimi-k2": CallFormat(
        _kimi, "<|tool_calls_section_begin|>functions.:0123<|dtool_call_argument_begin|> \nnull",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "functions.", "f:1", "g",
         "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_end|>", "tool_call", "<|", "null", "}}", *_JSON),
        begin="<|tool_calls_section_begin|>", between="", end="<|tool_calls_section_end|>",
    ),
    # None stands for null.
    "lfm2": CallFormat(
        _python, f"<|tool_call_start|><|tool_call_end|>[](),='{_SHAPES_FRAME}NoneTrueFals0",
        ("<|tool_call_start|>", "<|tool_call_start|>[f(", "<|tool_call_start|>[f(a=", "<|tool_call_end|>",
         "g(text='", "a=", "b=12", "'", "\\'", "\\x4", "\\u00e", "None", "True", ")]", "), ", "])", "007",
         '{"name": "f", "arguments": {', "<|", "{'a': ", "{1, ", '""', *_SHAPES),
        begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>",
    ),
    "pythonic": CallFormat(
        _python, "<|python_start|><|python_end|>[](),=' \\;\"\nNoneTrueFals0{}",
        ("[f(", "[f(a=", "<|python_start|>[f(", "<|python_end|>", "g(text='", "a=", "b=12", "'", "\\'",
         "\\x4", "None", "{'a': ", "{1, ", "True", ")]", "), ", "])", "<|", '""', *_JSON),
        begin="[", between=", ", end="]", alone=True,
    ),
}  # fmt: skip


def written(name: str, calls: list[tuple[str, dict[str, Any]]], **how: Any) -> str:
    """Calls as the models of the format write them; keywords are those of ``json.dumps``."""
    form = FORMATS[name]
    told = [form.tell(function, arguments, **how) for function, arguments in calls]
    return form.begin + form.between.join(told) + form.end if told else ""


def collect(deltas: list[Parsed]) -> tuple[str, Calls]:
    """The calls that a client assembles from the deltas, which follow OpenAI's order."""
    calls: Calls = []
    content, ids = "", set()
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            if call.index == len(calls):
                assert call.id
                assert call.name
                assert call.arguments == ""
                ids.add(call.id)
                calls.append((call.name, ""))
            else:
                assert call.id is None
                assert call.name is None
                assert call.arguments
                assert call.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert len(ids) == len(calls)
    return content, calls


def parse(name: str, parts: list[str]) -> tuple[str, Calls]:
    parser = PARSERS[name](SCHEMAS)
    return collect([*(parser.push(part) for part in parts), parser.finish()])


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[low:high] for low, high in itertools.pairwise([0, *cuts, len(text)])]
