"""``system_fingerprint``: in every answer and event, and another one if another thing computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aioinfer.config import EngineConfig
from aioinfer.execution.device import DeviceInfo
from aioinfer.server.openai import fingerprint as module
from aioinfer.server.openai.fingerprint import fingerprint
from tests.server.conftest import Serving

INFO = DeviceInfo(
    vocab_size=8,
    max_model_len=8,
    num_pages=8,
    eos_token_ids=frozenset(),
    description="",
    kernels={"attention": "native (the device is a cpu)", "sampling": "torch"},
)


def test_it_is_that_of_version_model_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="toy")
    first = fingerprint("toy", config, INFO)
    assert first.startswith("fp_")
    reordered = dict(reversed(INFO.kernels.items()))
    same = [
        replace(INFO, kernels=reordered, kv_bytes=1, num_pages=9, description="x"),
        replace(INFO, kernels={**INFO.kernels, "attention": "native (as given)"}),
    ]
    assert {fingerprint("toy", config, info) for info in same} == {first}
    others = [
        fingerprint("other", config, INFO),
        fingerprint("toy", replace(config, quantization="int8"), INFO),
        fingerprint("toy", replace(config, chat_template="{{ messages[0].content }}"), INFO),
        fingerprint("toy", config, replace(INFO, dtype="bfloat16")),
        fingerprint("toy", config, replace(INFO, kernels={**INFO.kernels, "sampling": "native"})),
    ]
    monkeypatch.setattr(module, "__version__", "99")
    others.append(fingerprint("toy", config, INFO))
    assert len({first, *others}) == 7


async def test_every_answer_and_event_has_it(serving: Serving) -> None:
    async with serving() as served:
        wanted = fingerprint("toy", served.engine.config, served.engine.info)
        for path, given in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("completions", {"prompt": "x"}),
        ):
            body = {"max_tokens": 2, **given}
            assert (await served.post(f"/v1/{path}", body)).json()["system_fingerprint"] == wanted
            stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
            events = (await served.post(f"/v1/{path}", stream)).events()
            assert {event["system_fingerprint"] for event in events} == {wanted}
