"""Tools of request bodies: the functions that may be called, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.fields import ChosenTool, Tool, ToolFunction
from aioinfer.errors import InvalidRequest, shown

__all__ = ["MAX_TOOLS", "Tools", "parse_tools"]

#: functions of one call
MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one API call. ``callable_functions``: the functions that ``tool_choice`` allows;
    ``required``: at least one call is required; ``parallel``: several calls are allowed."""

    functions: tuple[ToolFunction, ...]
    callable_functions: tuple[ToolFunction, ...]
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

    def for_template(self) -> list[dict[str, Any]]:
        """The functions in the form of chat templates."""
        return [{"type": "function", "function": _offered(each)} for each in self.functions]


def _offered(function: ToolFunction) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **described, "parameters": function.parameters}


def parse_tools(tools: Any, choice: Any = None, parallel: Any = None) -> Tools | None:
    """The tools of a chat, or None. Raises InvalidRequest of ``tools``, ``tool_choice`` or
    ``parallel_tool_calls``."""
    functions = _functions(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest("parallel_tool_calls", "must be true or false")
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


def _named(choice: Any, functions: tuple[ToolFunction, ...]) -> ToolFunction:
    name = admit(ChosenTool, choice, "tool_choice").function.name
    for each in functions:
        if each.name == name:
            return each
    raise InvalidRequest("tool_choice.function.name", f"{name[:64]!r} is not among the tools")


def _functions(tools: Any) -> tuple[ToolFunction, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest("tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    functions = tuple(admit(Tool, tool, f"tools[{at}]").function for at, tool in enumerate(tools))
    names: set[str] = set()
    for at, function in enumerate(functions):
        if function.name in names:
            raise InvalidRequest(f"tools[{at}].function.name", f"{function.name!r} is defined twice")
        names.add(function.name)
    return functions
