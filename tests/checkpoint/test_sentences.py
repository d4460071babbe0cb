"""The files of sentence-transformers: what is read of them, and one clear error for what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioinfer.checkpoint.sentences import Sentences
from aioinfer.errors import ConfigError

MEAN = {"pooling_mode_mean_tokens": True}


def write(directory: Path, /, pooling: Any = None, where: str = "1_Pooling", **modules: Any) -> Path:
    """``modules``: further fields of the pooling module."""
    listed = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", **modules}]
    (directory / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (directory / where).mkdir(exist_ok=True)
        (directory / where / "config.json").write_text(json.dumps(pooling))
    return directory


def test_pooling_is_read_where_the_modules_say_or_in_its_usual_place(tmp_path: Path) -> None:
    stated = {"pooling_mode_lasttoken": True}
    assert Sentences.of(write(tmp_path, stated, "2_Pooling", path="2_Pooling")).pooling == "last"
    assert Sentences.of(write(tmp_path, {"pooling_mode_cls_token": True})).pooling == "cls"


@pytest.mark.parametrize("where", ["..", "../x", "/etc", 5, None, "a/b"])
def test_a_place_outside_is_none(tmp_path: Path, where: Any) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json has no directory in the path"):
        Sentences.of(write(tmp_path, MEAN, path=where))


def test_modes_may_be_a_list(tmp_path: Path) -> None:
    assert Sentences.of(write(tmp_path, {"pooling_mode": ["lasttoken"]})).pooling == "last"
    two = Sentences.of(write(tmp_path, {"pooling_mode": ["mean", "cls"]}))
    assert two.unsupported == "it pools by 'mean' and 'cls'"


@pytest.mark.parametrize("mode", [5, {"a": 1}, [["mean"]], [5]])
def test_a_mode_that_is_no_name_is_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(ConfigError, match="pooling_mode is"):
        Sentences.of(write(tmp_path, {"pooling_mode": mode}))


@pytest.mark.parametrize("default", [[], {}, 5, "other"])
def test_a_default_prompt_that_is_not_there_is_refused(tmp_path: Path, default: Any) -> None:
    stated = {"prompts": {"query": "q: "}, "default_prompt_name": default}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="make no sense"):
        Sentences.of(write(tmp_path, MEAN))


@pytest.mark.parametrize("text", ["[" * 100_000, "{}x", "5", "[5]", '[{"type": 1}, []]'])
def test_modules_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json cannot be read"):
        Sentences.of(tmp_path)


def test_a_missing_file_of_the_pooling_is_not_taken_for_one_that_states_no_mode(tmp_path: Path) -> None:
    assert "1_Pooling/config.json" in Sentences.of(write(tmp_path)).unsupported
    there = Sentences.of(write(tmp_path, {"word_embedding_dimension": 8}))
    assert (there.pooling, there.unsupported, there.embeds) == ("mean", "", True)


def reranker(directory: Path, answers: Any) -> Path:
    listed = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_Other"}]
    (directory / "modules.json").write_text(json.dumps(listed))
    if answers is not None:
        (directory / "1_Other").mkdir()
        (directory / "1_Other" / "config.json").write_text(json.dumps(answers))
    return directory


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ({"true_token_id": 7, "false_token_id": 3}, (7, 3)),
        ({"true_token_id": 7, "false_token_id": None}, (7,)),
        (None, ()),
    ],
)
def test_a_reranker_embeds_nothing_and_says_what_it_answers_with(
    tmp_path: Path, stated: Any, wanted: Any
) -> None:
    found = Sentences.of(reranker(tmp_path, stated))
    assert (found.stated, found.embeds, found.answers) == (True, False, wanted)
    assert "LogitScore" in found.unsupported


@pytest.mark.parametrize("stated", [{}, {"true_token_id": "yes"}, {"true_token_id": 4, "false_token_id": 4}])
def test_answers_that_are_no_tokens_are_refused(tmp_path: Path, stated: Any) -> None:
    with pytest.raises(ConfigError, match=r"1_Other/config\.json names no tokens"):
        Sentences.of(reranker(tmp_path, stated))


def test_the_length_is_the_files(tmp_path: Path) -> None:
    assert Sentences.of(write(tmp_path, MEAN)).max_tokens is None
    file = tmp_path / "sentence_bert_config.json"
    for stated, wanted in (({"max_seq_length": 256}, 256), ({"max_seq_length": None}, None), ({}, None)):
        file.write_text(json.dumps(stated))
        assert Sentences.of(tmp_path).max_tokens == wanted
    for wrong in (0, "256", 2.5, True):
        file.write_text(json.dumps({"max_seq_length": wrong}))
        with pytest.raises(ConfigError, match="max_seq_length"):
            Sentences.of(tmp_path)


def test_the_activation_is_that_of_the_newest_file(tmp_path: Path) -> None:
    assert Sentences.of(tmp_path).activation == "Sigmoid"
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    inner = {"sentence_transformers": {"activation_fn": "x.Tanh"}}
    for name, stated, wanted in (
        ("config.json", old, "Identity"),
        ("config.json", {**old, **inner}, "Tanh"),
        ("config_sentence_transformers.json", {"activation_fn": "x.Other"}, "Other"),
    ):
        (tmp_path / name).write_text(json.dumps(stated))
        assert Sentences.of(tmp_path).activation == wanted
