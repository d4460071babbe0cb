"""Numbers of every spelling in every numeric field: exactly what was written, or a 400."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.server.openai.fields import ALIASES, CompletionBody
from aioinfer.server.openai.protocol import Served, parse_completion
from tests.server.conftest import Serving
from tests.server.raw import errors

OFFER = Served("toy", SamplingParams(), ChatFormat())
#: not JSON, or numbers of more digits than any field has
REFUSED = [
    *("NaN", "Infinity", "-Infinity", "9" * 65, "0." + "1" * 64, "1" * 5000, "1e" + "9" * 70),
    *("01", "1.", "+1"),
]
SPELLED = [
    *("1e400", "-1e400", "1e-400", "0", "-0", "-0.0", "1", "1.0", "1e0", "10e-1", "0.1", "1e308"),
    *("true", '"1"'),
    *("9" * 64, "-" + "9" * 63, "0." + "3" * 62, "9223372036854775807", "9223372036854775808", "[]", "{}"),
]
SCALAR = {each.name for each in fields(SamplingParams) if str(each.type).split(" | ")[0] in ("int", "float")}
PARAMS = {name: ALIASES.get(name, name) for name in CompletionBody.honoured}
NUMERIC = {name: param for name, param in sorted(PARAMS.items()) if param in SCALAR - {"logprobs"}}
OTHERS = ["n", "best_of", "logprobs", "priority"]


def body(field: str, spelled: str) -> bytes:
    most = "" if field == "max_tokens" else '"max_tokens":1,'
    return f'{{"prompt":[1,2],{most}{json.dumps(field)}:{spelled}}}'.encode()


@pytest.mark.parametrize("field", [*NUMERIC, *OTHERS])
def test_a_number_is_taken_as_it_is_written_or_refused_by_name(field: str) -> None:
    for spelled in REFUSED:
        with pytest.raises(InvalidRequest) as refused:
            parse_completion(body(field, spelled), OFFER)
        assert refused.value.field == "body"
    for spelled in SPELLED:
        try:
            call = parse_completion(body(field, spelled), OFFER)
        except InvalidRequest as error:
            assert error.field in (field, {"best_of": "n"}.get(field)), spelled
            continue
        if field in NUMERIC:
            assert getattr(call.params, NUMERIC[field]) == json.loads(spelled), spelled


async def test_no_number_in_a_field_is_an_error_of_the_server(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        for field in ["temperature", "seed", "max_tokens", "top_k", *OTHERS]:
            for spelled in [*REFUSED, *SPELLED]:
                reply = await served.post("/v1/completions", body(field, spelled))
                assert reply.status in (200, 400), (field, spelled)
    assert not errors(caplog)
