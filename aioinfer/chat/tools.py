"""Tools of request bodies: the functions that may be called, and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioinfer.chat.fields import NESTED, check
from aioinfer.errors import InvalidRequest, shown

__all__ = ["MAX_TOOLS", "Function", "Tools", "parse_tools"]

#: functions of one call
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. ``parameters`` is the JSON schema of an object; ``strict``: the
    arguments are constrained to it."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool

    def for_template(self) -> dict[str, Any]:
        """The function in the form of chat templates."""
        offered = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {k: v for k, v in offered.items() if v is not None}}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one API call. ``callable_functions``: the functions that ``tool_choice`` allows;
    ``required``: at least one call is required; ``parallel``: several calls are allowed."""

    functions: tuple[Function, ...]
    callable_functions: tuple[Function, ...]
    required: bool
    parallel: bool

    @property
    def enforced(self) -> bool:
        """The tools require a grammar; otherwise the answer is parsed only."""
        return self.required or not self.parallel or any(each.strict for each in self.callable_functions)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Function name -> JSON schema of its arguments in the grammar: any object for a function that is
        neither strict nor required."""
        return {
            each.name: each.parameters if each.strict or self.required else {"type": "object"}
            for each in self.callable_functions
        }


def parse_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a chat, or None. Raises InvalidRequest."""
    functions = _functions(body.get("tools"))
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest("parallel_tool_calls", "must be true or false")
    choice = body.get("tool_choice")
    if choice == "none":
        return None
    if not functions:
        if choice is not None:
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    chosen = functions
    if isinstance(choice, dict):
        chosen = (_named(choice, functions),)
    elif choice not in (None, "auto", "required"):
        raise InvalidRequest(
            "tool_choice", f"must be auto, none, required or a function, got {shown(choice)}"
        )
    return Tools(
        functions=functions,
        callable_functions=chosen,
        required=choice not in (None, "auto"),
        parallel=parallel is not False and not isinstance(choice, dict),
    )


def _named(choice: Mapping[str, Any], functions: tuple[Function, ...]) -> Function:
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type", "must be 'function'")
    check(choice, NESTED["tool_choice"], "tool_choice.")
    function = choice.get("function")
    if isinstance(function, dict):
        check(function, NESTED["tool_choice.function"], "tool_choice.function.")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice.function.name", "is missing")
    for each in functions:
        if each.name == name:
            return each
    raise InvalidRequest("tool_choice.function.name", f"{name[:64]!r} is not among the tools")


def _functions(tools: Any) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest("tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    functions = tuple(_function(f"tools[{at}]", tool) for at, tool in enumerate(tools))
    names: set[str] = set()
    for at, function in enumerate(functions):
        if function.name in names:
            raise InvalidRequest(f"tools[{at}].function.name", f"{function.name!r} is defined twice")
        names.add(function.name)
    return functions


def _function(field: str, tool: Any) -> Function:
    if not isinstance(tool, dict):
        raise InvalidRequest(field, "must be an object")
    if tool.get("type") != "function":
        raise InvalidRequest(f"{field}.type", "must be 'function'")
    check(tool, NESTED["tools[]"], f"{field}.")
    field = f"{field}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(field, "must be an object")
    check(function, NESTED["tools[].function"], f"{field}.")
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{field}.name", "must be 1 to 64 letters, digits, underscores and hyphens")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{field}.description", "must be text")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{field}.strict", "must be true or false")
    return Function(name, description, _parameters(f"{field}.parameters", function), bool(strict))


def _parameters(field: str, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise InvalidRequest(field, "must be a JSON schema, which is an object")
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{field}.type", "must be 'object'")
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequest(f"{field}.properties", "must be an object")
    return {"type": "object", **parameters}
