"""Prediction: OpenAI's field for what an answer is expected to be."""

from __future__ import annotations

from typing import Any

from aioinfer.chat.schemas import TEXT, Schema, array, choice, either
from aioinfer.errors import InvalidRequest, shown

__all__ = ["PREDICTION", "parse_prediction"]


def _object(**properties: Schema) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


PREDICTION: Schema = _object(
    type=choice("content"), content=either(TEXT, array(_object(type=choice("text"), text=TEXT)))
)


def parse_prediction(given: Any) -> str:
    """The text of ``{"type": "content", "content": ...}``. Raises InvalidRequest."""
    if not isinstance(given, dict):
        raise InvalidRequest("prediction", f"must be an object, got {shown(given)}")
    for key in given:
        if key not in ("type", "content"):
            raise InvalidRequest(f"prediction.{key}", "is not known", code="unknown_parameter")
    if given.get("type") != "content":
        raise InvalidRequest("prediction.type", f'must be "content", got {shown(given.get("type"))}')
    content = given.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("prediction.content", "must be text, or a list of parts of text")
    return "".join(_part(at, part) for at, part in enumerate(content))


def _part(at: int, part: Any) -> str:
    if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
        raise InvalidRequest(f"prediction.content[{at}]", 'must be {"type": "text", "text": ...}')
    if not isinstance(part["text"], str):
        raise InvalidRequest(f"prediction.content[{at}].text", f"must be text, got {shown(part['text'])}")
    text: str = part["text"]
    return text
