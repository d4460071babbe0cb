"""Bodies: JSON objects of requests, declared once as pydantic models.

A field of an :class:`Object` is honoured; the names in ``harmless`` are accepted because they cannot change
the answer; those in ``refused`` are refused unless their value changes nothing; any other name is refused.
Null is the same as an absent field, everywhere. Checks, the OpenAPI document and ``docs/fields.md`` come from
the same declaration. A server or the first chat imports pydantic; ``import aioinfer`` does not.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, Union, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from aioinfer.errors import InvalidRequest, shown

__all__ = [
    "CACHING",
    "CLIENTS",
    "NO",
    "OFF",
    "Items",
    "Object",
    "PlainSchema",
    "Refused",
    "TextOr",
    "admit",
    "field",
    "later",
    "tagged",
]

#: characters of an unknown field in an error
_MAX_NAME = 80
#: kind of pydantic's error -> message
_SAID = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}
_SUBJECT = re.compile(r"^\w+ should")
#: errors whose message says what was given
_COMPLETE = frozenset({"missing", "too_short", "too_long", "string_too_short", "string_too_long"})

_T = TypeVar("_T")
_ObjectT = TypeVar("_ObjectT", bound="Object")


class _FailFast(FailFast):
    """Hashable, so that a list can be part of a union."""

    __hash__ = object.__hash__


#: a list whose first wrong item ends the check
Items = Annotated[list[_T], _FailFast()]


class Refused(NamedTuple):
    """The values that change nothing, and what to use instead of others. ``code``: of the error."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""
    code: str = "unsupported_parameter"


NO, OFF = Refused(), Refused((False,))
CLIENTS = "the client's bookkeeping"
CACHING = "how long a prefix stays cached"


class Object(BaseModel):
    """A JSON object of a request.

    Arguments of its classes, to which those of their bases are added:
        harmless: name -> why it cannot change the answer.
        refused: name -> which of its values are accepted.
        open_ended: further names are accepted if the context of a validation has them.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    harmless: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, Refused]] = {}
    open_ended: ClassVar[bool] = False
    honoured: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **tables: Any) -> None:
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **tables: Any) -> None:
        bases = [base for base in reversed(cls.__bases__) if issubclass(base, Object)]
        cls.harmless = dict(ChainMap(tables.get("harmless", {}), *[dict(base.harmless) for base in bases]))
        cls.refused = dict(ChainMap(tables.get("refused", {}), *[dict(base.refused) for base in bases]))
        cls.open_ended = tables.get("open_ended", False)
        cls.honoured = frozenset(each.alias or name for name, each in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _admit(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict) or (given.keys() <= cls.honoured and None not in given.values()):
            return given
        found = {}
        for name, value in given.items():
            if value is None or name in cls.harmless:
                continue
            if name in cls.honoured:
                found[name] = value
            elif (rule := cls.refused.get(name)) is not None:
                if not any(_same(value, each) for each in rule.neutral):
                    instead = f": {rule.instead}" if rule.instead else ""
                    raise InvalidRequest(name, f"is not supported by this server{instead}", code=rule.code)
            elif not (cls.open_ended and info.context and name in info.context):
                message = "is not a field that this server knows"
                raise InvalidRequest(name[:_MAX_NAME], message, code="unknown_parameter")
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler.resolve_ref_schema(handler(core))
        properties = found.setdefault("properties", {})
        for name, reason in cls.harmless.items():
            properties.setdefault(name, {"description": f"has no effect: {reason}"})
        for name, rule in cls.refused.items():
            instead = f": {rule.instead}" if rule.instead else ""
            schema: dict[str, Any] = {"description": f"other values are refused{instead}"}
            if not cls.open_ended:
                schema["enum"] = [*rule.neutral, None]
            properties.setdefault(name, schema)
        if cls.open_ended:
            found.pop("additionalProperties", None)
        return found


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and is not true."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def field(meaning: str, default: Any = None, **constraints: Any) -> Any:
    """A field with this meaning, which may be absent; ``...`` as its default: which must be there."""
    if isinstance(default, type):
        return Field(default_factory=default, description=meaning, **constraints)
    return Field(default, description=meaning, **constraints)


def later(schema: Any, *, required: bool = False) -> PlainValidator:
    """The schema of a value that is checked where it is used; it may be null unless ``required``."""
    return PlainValidator(_as_given, json_schema_input_type=schema if required else Union[schema, None])  # noqa: UP007


def _as_given(value: Any) -> Any:
    return value


if TYPE_CHECKING:
    TextOr: TypeAlias = str | _T
if not TYPE_CHECKING:

    class TextOr:
        """Text, or a value of another type, which is a list or a dictionary. Unlike a union, it adds nothing
        to the path of an error."""

        def __class_getitem__(cls, other: Any) -> Any:
            several = get_origin(other) is not dict and not isinstance(other, type)
            what = "a list" if several else "an object"

            def unless_text(given: Any, check: Callable[[Any], Any]) -> Any:
                if isinstance(given, str):
                    return given
                if not isinstance(given, (list, dict)):
                    raise InvalidRequest("", f"must be text or {what}, got {shown(given)}")
                return check(given)

            return Annotated[other, WrapValidator(unless_text, json_schema_input_type=Union[str, other])]  # noqa: UP007


def tagged(*kinds: Any, pick: Callable[[Any], Any], unknown: Callable[[Any], str]) -> PlainValidator:
    """The model of an object whose ``type`` says which of ``kinds`` it is: ``pick`` returns the one of a
    type, or None. ``unknown``: the message about another type."""
    schema: Any = Union[kinds]  # noqa: UP007

    def choose(given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            raise InvalidRequest("", f"must be an object, got {shown(given)}")
        kind = given.get("type")
        model = pick(kind) if isinstance(kind, (str, type(None))) else None
        if model is None:
            raise InvalidRequest("type", unknown(kind), code="unsupported_parameter")
        return model.model_validate(given, context=info.context)

    return PlainValidator(choose, json_schema_input_type=schema)


def admit(kind: type[_ObjectT], given: Any, path: str = "", also: Iterable[str] = ()) -> _ObjectT:
    """The object at ``path`` of a body. ``also``: further names of objects that are ``open_ended``. Raises
    InvalidRequest, by the path of a field."""
    try:
        return kind.model_validate(given, context=also)
    except ValidationError as error:
        raise _refusal(error, path) from None


def _refusal(failed: ValidationError, path: str) -> InvalidRequest:
    """The first error, by its path."""
    error = failed.errors(include_url=False)[0]
    for part in error["loc"]:
        path = _joined(path, f"[{part}]" if isinstance(part, int) else part)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return InvalidRequest(_joined(path, cause.field), cause.message, code=cause.code)
    kind = error["type"]
    message = _SAID.get(kind) or _SUBJECT.sub("must", error["msg"], 1)
    if kind not in _COMPLETE:
        message = f"{message}, got {shown(error['input'])}"
    return InvalidRequest(path or "body", message)


def _joined(path: str, name: str) -> str:
    return f"{path}{'.' if path and name and not name.startswith('[') else ''}{name}"


class PlainSchema(GenerateJsonSchema):
    """JSON schemas without titles and without null as a default."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return (
            self.generate_inner(schema["schema"])
            if schema.get("default") is None
            else super().default_schema(schema)
        )
