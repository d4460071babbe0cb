"""Formats of texts in JSON schemas as patterns, where llguidance allows more than the format does."""

from __future__ import annotations

__all__ = ["ANY_TEXT", "KNOWN", "PARTS"]

#: formats of pydantic that any text has, or any that a grammar can tell
ANY_TEXT = frozenset({"binary", "password", "path", "file-path", "directory-path"})
#: formats that llguidance knows
KNOWN = frozenset(("duration", "email", "ipv4", "ipv6", "uuid", "uri", "unknown"))

_BASE64 = "[A-Za-z0-9+/]"
_BASE64URL = "[A-Za-z0-9_-]"

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"([0-9]{{4}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(\.[0-9]+)?"


#: with leap seconds in UTC only: each offset has another local time for them
_TIME = f"({_MINUTE}:[0-5][0-9]{_FRACTION}([Zz]|[+-]{_MINUTE})|23:59:60{_FRACTION}([Zz]|[+-]00:00))"

_LETTER = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
#: At most 63 characters. Without "--" in the third place, behind which internationalized names are encoded.
_LABEL = (
    f"{_LETTER}({_LETTER}|{_INNER}{_LETTER}|{_INNER}{{2}}{_LETTER}"
    f"|{_INNER}({_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
)

#: format -> schemas that a text of it has to match, all of them
PARTS = {
    "base64": ({"pattern": f"^({_BASE64}{{4}})*({_BASE64}{{2}}==|{_BASE64}{{3}}=)?$"},),
    "base64url": ({"pattern": f"^({_BASE64URL}{{4}})*({_BASE64URL}{{2}}==|{_BASE64URL}{{3}}=)?$"},),
    "date": ({"pattern": f"^{_DATE}$"},),
    "time": ({"pattern": f"^{_TIME}$"},),
    "date-time": ({"pattern": f"^{_DATE}[Tt]{_TIME}$"},),
    "hostname": ({"pattern": rf"^{_LABEL}(\.{_LABEL})*$"}, {"maxLength": 253}),
    "ipvanyaddress": ({"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},),
}
PARTS["byte"] = PARTS["base64"]
