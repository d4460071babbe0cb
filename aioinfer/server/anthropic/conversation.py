"""Conversation: Anthropic's messages and their blocks as the messages of a chat."""

from __future__ import annotations

from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.images import ImageReader
from aioinfer.chat.order import TemplateOrder
from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.anthropic.fields import (
    ImageBlock,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)

__all__ = ["Conversation"]

#: blocks of the messages of a role
_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_ERROR = "Error: "


class Conversation:
    """Messages of a chat, and where in the body each comes from.

    Results of tools are messages of their own, in front of what the user says beside them. Successive
    messages of the user are one, as in Anthropic's protocol.
    """

    def __init__(self, _order: TemplateOrder | None = None, images: ImageReader | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        #: path of a message -> path in the body
        self.names: dict[str, str] = {}
        #: efforts that system messages ask for, and their paths in the body
        self.efforts: list[tuple[Any, str]] = []
        #: names of the tools that results refer to
        self.loaded: set[str] = set()
        self._functions: dict[str, str] = {}
        self._images = images or ImageReader()

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def read(self, system: str | list[TextBlock] | None, given: list[Any]) -> None:
        """The fields ``system`` and ``messages``, which may be checked already. Raises InvalidRequest of a
        field of the body."""
        messages = [
            admit(MessageParam, message, f"messages[{number}]") if isinstance(message, dict) else message
            for number, message in enumerate(given)
        ]
        text = system if isinstance(system, str) else "".join([block.text for block in system or ()])
        if text:
            self._add("system", text, "system")
        last_of_user = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
        for number, message in enumerate(messages):
            field = f"messages[{number}]"
            self._check(field, message)
            if message.output_config is not None:
                self.efforts.append((message.output_config.effort, f"{field}.output_config.effort"))
            configured = bool(message.output_config and message.output_config.model_fields_set)
            blocks: Any = message.content
            if isinstance(blocks, str):
                blocks = [TextBlock.model_construct(text=blocks)]
            elif blocks is None and configured:
                blocks = []
            elif blocks is None:
                raise InvalidRequest(f"{field}.content", "is missing")
            if message.role == "assistant":
                self._assistant(field, blocks)
            elif blocks or not configured:
                cleared = message.clear_at == "next_user_message" and number < last_of_user
                self._others(message.role, field, blocks, left_out=cleared)

    def _check(self, field: str, message: MessageParam) -> None:
        """Raise InvalidRequest for what messages of another role may have."""
        for name in ("clear_at", "output_config"):
            if getattr(message, name) is not None and message.role != "system":
                raise InvalidRequest(f"{field}.{name}", "is for system messages")
        known = _BLOCKS[message.role]
        for at, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.type not in known:
                said = f"{shown(block.type)} of {message.role} is not supported by this server"
                where = f"{field}.content[{at}].type"
                raise InvalidRequest(where, f"{said}: {', '.join(known)}", code="unsupported_parameter")

    def _assistant(self, field: str, blocks: list[Any]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        at = f"messages[{len(self.messages)}]"
        for number, block in enumerate(blocks):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    where, called = f"{field}.content[{number}]", f"{at}.tool_calls[{len(calls)}]"
                    self.names |= {f"{at}.tool_calls": field, called: where, f"{called}.function": where}
                    self._functions[block.id] = block.name
                    function = {"name": block.name, "arguments": block.input or {}}
                    calls.append({"id": block.id, "type": "function", "function": function})
        message = self._add("assistant", "".join(texts), field)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls

    def _others(self, role: str, field: str, blocks: list[Any], *, left_out: bool) -> None:
        """A message of the user, or of the system in the midst of the conversation; what is ``left_out`` is
        checked only."""
        said: list[tuple[str, Any]] = []
        results = 0
        for number, block in enumerate(blocks):
            where = f"{field}.content[{number}]"
            if isinstance(block, ToolResultBlock):
                self._result(where, block)
                results += 1
            else:
                said.append((where, block))
        if left_out or (results and not said):
            return
        last = self.messages[-1] if self.messages else {}
        if role == "user" and last.get("role") == "user":
            # The message goes on: its parts so far come first.
            before = _parts(last["content"])
            last["content"] = [*before, *self._parts(said, "\n\n", len(before))]
        else:
            message = self._add(role, "", field)
            message["content"] = _plain(self._parts(said))

    def _parts(self, said: list[tuple[str, Any]], begin: str = "", before: int = 0) -> list[dict[str, Any]]:
        """Blocks, by where they come from, as the parts of the last message that come behind ``before``
        others. Texts beside each other are one, and the first one begins with ``begin``."""
        parts: list[dict[str, Any]] = []
        texts = [begin] if begin else []
        for where, block in said:
            if not isinstance(block, ImageBlock):
                texts.append(self._text(block))
                continue
            parts += _joined(texts)
            texts.clear()
            source, field = block.source, f"{where}.source"
            place = f"messages[{len(self.messages) - 1}].content[{before + len(parts)}]"
            self._images.names[place] = field
            if isinstance(source, URLSource):
                parts.append(self._images.at(source.url, f"{field}.url"))
            else:
                parts.append(self._images.encoded(source.data, source.media_type, f"{field}.data"))
        return [*parts, *_joined(texts)]

    def _result(self, where: str, block: ToolResultBlock) -> None:
        content = block.content
        if isinstance(content, str):
            content = [TextBlock.model_construct(text=content)]
        blocks = [(f"{where}.content[{number}]", each) for number, each in enumerate(content)]
        message = self._add("tool", "", where)
        # Chat templates know no failed results: the text has to say it.
        message["content"] = _plain(self._parts(blocks, _ERROR if block.is_error else ""))
        message["tool_call_id"] = block.tool_use_id
        if block.tool_use_id in self._functions:
            message["name"] = self._functions[block.tool_use_id]

    def _text(self, block: TextBlock | ToolReferenceBlock) -> str:
        """The text of a block; a reference is the name of a tool."""
        if isinstance(block, TextBlock):
            return block.text
        self.loaded.add(block.tool_name)
        return f"{block.tool_name}\n"

    def _add(self, role: str, content: str, field: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": content}
        self.names[f"messages[{len(self.messages)}]"] = field
        self.messages.append(message)
        return message


def _joined(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "".join(texts)}] if texts else []


def _plain(parts: list[dict[str, Any]]) -> Any:
    """The text of parts that are nothing else."""
    if len(parts) > 1 or (parts and parts[0]["type"] != "text"):
        return parts
    return parts[0]["text"] if parts else ""


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
