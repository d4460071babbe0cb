"""``chat_template``: a template in place of the model's, read when the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.loop.factory import load_tokenizer
from aioinfer.text.tool_calls import Hermes
from tests.text.test_template_formats import HERMES

USER = [{"role": "user", "content": "Hi"}]
SHOUT = "{% for m in messages %}<<{{ m.content | upper }}>>{% endfor %}"


def rendered(setting: str) -> str:
    tokenizer = load_tokenizer(EngineConfig(chat_template=setting))
    assert tokenizer is not None
    return tokenizer.decode(tokenizer.encode_chat(USER), skip_special_tokens=False)


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    assert rendered(SHOUT) == "<<HI>>"
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUT)
    assert rendered(str(file)) == "<<HI>>"


def test_a_template_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    large = tmp_path / "large.jinja"
    large.write_text(" " * ((1 << 20) + 1))
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"\xff\xfe")
    for setting in ("{% for %}", str(tmp_path / "missing.jinja"), str(tmp_path), str(large), str(binary)):
        with pytest.raises(ConfigError, match=r"^chat_template: "):
            rendered(setting)
    with pytest.raises(ConfigError, match=r"^chat_template must"):
        EngineConfig(chat_template=" ")


async def test_the_parsers_follow_the_template() -> None:
    """Found out once per start; a closed engine keeps none."""
    engine = Engine(EngineConfig(threads=1, chat_template=HERMES))
    assert engine.chat_format.tools is None
    async with engine:
        assert engine.chat_format.tools is Hermes
        assert engine.chat_format is engine.chat_format
        assert engine.chat_format.template_names is not None
        assert "tool" in engine.chat_format.template_names
