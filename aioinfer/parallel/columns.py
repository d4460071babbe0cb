"""Columns: the rows of a step as bytes, and back.

What every row has stands in columns, which cost a few calls for all rows together; what few rows have is a
list of JSON objects, one for each row whose flag says so::

    counts of rows, tokens, bytes of text, bytes of JSON
    attempt int64[R]  first uint32[R]  at uint32[R]  tokens uint32[R]  characters uint32[R]  flags uint8[R]
    ids uint32[tokens]  text, UTF-8  JSON

Times are ages, since two processes need not have one clock.
"""

from __future__ import annotations

import base64
import functools
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.outputs import Draft, TokenLogprob
from aioinfer.parallel.errors_record import error_of, error_record
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.record import Ending
from aioinfer.parallel.replica import Rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["pack_rows", "unpack_rows"]

_COUNTS = struct.Struct("<IIII")
_IDENTICAL, _RARE = 1, 2
_REASONS = ("stop", "length", "abort")
#: so that a text with half a surrogate pair is sent as it is
_LONE = "surrogatepass"


def pack_rows(rows: Sequence[tuple[int, Rows]], now: float) -> bytes:
    """The payload for rows of attempts. ``prompt_logprobs`` are those that were not sent before, drafts those
    of this moment, and ``admitted_at`` and ``cached_tokens`` count where the former is not None."""
    numbers, firsts, ats, counts, sizes, flags = [], [], [], [], [], bytearray()
    ids: list[int] = []
    texts: list[str] = []
    rare: list[dict[str, Any]] = []
    for number, row in rows:
        numbers.append(number)
        firsts.append(row.first)
        ats.append(row.at)
        counts.append(len(row.ids))
        sizes.append(len(row.text))
        ids += row.ids
        texts.append(row.text)
        further = _further(row, now)
        if further:
            rare.append(further)
        flags.append((_IDENTICAL if row.identical else 0) | (_RARE if further else 0))
    blob = "".join(texts).encode(errors=_LONE)
    tail = json.dumps(rare, separators=(",", ":")).encode() if rare else b""
    count = len(numbers)
    return b"".join(
        (
            _COUNTS.pack(count, len(ids), len(blob), len(tail)),
            struct.pack(f"<{count}q{4 * count}I", *numbers, *firsts, *ats, *counts, *sizes),
            flags,
            struct.pack(f"<{len(ids)}I", *ids),
            blob,
            tail,
        )
    )


def unpack_rows(payload: bytes, now: float, vocab_size: int) -> list[tuple[int, Rows]]:
    """The rows of a payload, with ``now`` as the time of all their tokens, which are below ``vocab_size``.
    Raises FrameError."""
    try:
        return _unpacked(payload, now, vocab_size)
    except FrameError:
        raise
    except Exception as error:  # of any kind: the payload can be anything
        raise FrameError(f"rows that make no sense: {error!r}") from error


def _unpacked(payload: bytes, now: float, vocab_size: int) -> list[tuple[int, Rows]]:
    count, tokens, size, tail = _COUNTS.unpack_from(payload)
    at = _COUNTS.size + 25 * count
    if at + 4 * tokens + size + tail != len(payload):
        raise FrameError("rows of another size than their counts say")
    columns = struct.unpack_from(f"<{count}q{4 * count}I", payload, _COUNTS.size)
    numbers, firsts, ats, counts, sizes = (columns[part * count : (part + 1) * count] for part in range(5))
    flags = payload[at - count : at]
    ids = struct.unpack_from(f"<{tokens}I", payload, at)
    if ids and max(ids) >= vocab_size:
        raise FrameError(f"a token {max(ids)} that is not in the vocabulary")
    at += 4 * tokens
    text = payload[at : at + size].decode(errors=_LONE)
    if sum(counts) != tokens or sum(sizes) != len(text):
        raise FrameError("rows with other tokens or texts than their counts say")
    further = iter(_objects(payload[at + size :]))
    found: list[tuple[int, Rows]] = []
    token = character = 0
    one = (now,)
    for number, first, start, own, length, flag in zip(
        numbers, firsts, ats, counts, sizes, flags, strict=True
    ):
        end, behind = token + own, character + length
        row = Rows(first, start, ids[token:end], text[character:behind], one if own == 1 else one * own)
        row.identical = bool(flag & _IDENTICAL)
        if flag & _RARE:
            _add(row, next(further), now)
        found.append((number, row))
        token, character = end, behind
    if next(further, None) is not None:
        raise FrameError("more objects than rows that have one")
    return found


def _objects(data: bytes) -> list[dict[str, Any]]:
    found = json.loads(data) if data else []
    if not (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        raise FrameError("what rows have besides their columns must be objects")
    return found


# -- what few rows have --------------------------------------------------------------------------------


def _further(row: Rows, now: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if row.admitted_at is not None:
        found["admitted"] = [max(0.0, now - row.admitted_at), row.cached_tokens]
    if row.weight_version is not None:
        found["weights"] = row.weight_version
    if row.adapter_fingerprint:
        found["adapter"] = row.adapter_fingerprint
    if row.logprobs:
        found["logprobs"] = _plain(row.logprobs)
    if row.prompt_logprobs:
        found["prompt_logprobs"] = _plain(row.prompt_logprobs)
    if row.steps:
        found["steps"] = list(row.steps)
    draft = None if row.draft is None else row.draft()
    if draft is not None:
        found["draft"] = [draft.start, draft.token_ids, draft.text, draft.step_map]
    ending = row.ending
    if ending is not None:
        error = None if ending.error is None else error_record(ending.error)
        found["ending"] = [ending.finish_reason, ending.stop_reason, error, ending.predicted]
        if ending.pooled is not None:
            found["pooled"] = _numbers_record(ending.pooled)
    return found


def _plain(logprobs: Sequence[TokenLogprob]) -> list[Any]:
    return [[each.token_id, each.logprob, each.top] for each in logprobs]


def _add(row: Rows, further: dict[str, Any], now: float) -> None:
    for name, value in further.items():
        match name:
            case "admitted":
                age, row.cached_tokens = _is(value[0], float, int), _is(value[1], int)
                row.admitted_at = now - age
            case "weights":
                row.weight_version = _is(value, int)
            case "adapter":
                row.adapter_fingerprint = _is(value, str)
            case "logprobs" | "prompt_logprobs":
                setattr(row, name, [_logprob(*each) for each in value])
            case "steps":
                row.steps = [_is(each, int) for each in _is(value, list)]
            case "draft":
                row.draft = functools.partial(_draft, *value)
                row.draft()  # raises what is wrong with it now
            case "ending":
                row.ending = _ending(*value)
            case "pooled" if row.ending is not None:
                row.ending.pooled = _numbers(*value)
            case _:
                raise FrameError(f"rows have no {name[:40]!r}")
    for name in ("logprobs", "steps"):
        if len(getattr(row, name)) not in (0, len(row.ids)):
            raise FrameError(f"{name} for other tokens than there are")


def _is(value: Any, *kinds: Any) -> Any:
    if type(value) not in kinds:
        raise FrameError(f"a value of type {type(value).__name__} where {kinds[0].__name__} is expected")
    return value


def _logprob(token: Any, logprob: Any, top: Any) -> TokenLogprob:
    pairs = tuple((_is(other, int), float(_is(value, float, int))) for other, value in top)
    return TokenLogprob(_is(token, int), float(_is(logprob, float, int)), pairs)


def _draft(start: Any, ids: Any, text: Any, steps: Any) -> Draft:
    none = type(None)
    return Draft(
        _is(start, int),
        tuple(_is(each, int, none) for each in ids),
        _is(text, str),
        tuple(_is(each, int, none) for each in steps),
    )


def _numbers_record(numbers: Any) -> list[Any]:
    """An array of float32, as its shape and its bytes."""
    return [list(numbers.shape), base64.b64encode(numbers.astype("<f4").tobytes()).decode()]


def _numbers(shape: Any, data: Any) -> npt.NDArray[np.float32]:
    import numpy as np

    shape = [_is(each, int) for each in _is(shape, list)]
    found = np.frombuffer(base64.b64decode(_is(data, str), validate=True), "<f4")
    return found.astype(np.float32).reshape(shape)


def _ending(reason: Any, stop: Any, error: Any, predicted: Any) -> Ending:
    if reason not in _REASONS:
        raise FrameError("an output ends for another reason")
    right, wrong = (_is(each, int) for each in predicted)
    return Ending(
        reason,
        _is(stop, str, int, type(None)),
        None if error is None else error_of(error),
        (right, wrong),
    )
