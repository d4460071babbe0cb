"""Embeddings and scores of small random models are those of transformers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from aioinfer import LLM, Engine, EngineConfig, InvalidRequest, Pooling, SamplingParams
from aioinfer.embeddings.scoring import _JUDGE
from aioinfer.errors import ConfigError
from tests.compiled import require_native
from tests.model.checkpoints import VOCAB, make_checkpoint, make_model
from tests.tiers import FURTHER, SECONDS, grid, rest

Checkpoints = Callable[[str], tuple[Path, Any]]
FAMILIES = ["llama-biases", "qwen3", "gpt2"]
KERNELS: dict[str, dict[str, Any]] = {
    "auto": {},
    "torch": {"attention_backend": "sdpa"},
    "transformers": {"transformers_fallback": True},
}


def config(path: Path, **settings: Any) -> EngineConfig:
    usual: dict[str, Any] = {"page_size": 4, "num_pages": 96, "max_running_requests": 4, "dtype": "float32"}
    return EngineConfig(model=str(path), **{**usual, **settings})


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    common = rng.choices(range(VOCAB), k=21)
    return [
        [*(common if index % 2 else ()), *rng.choices(range(VOCAB), k=rng.randint(1, 40))]
        for index in range(count)
    ]


@torch.no_grad()
def hidden(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """float32 [tokens, hidden], by transformers."""
    states: torch.Tensor = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    return states.numpy()


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(one.ravel() @ other.ravel() / np.linalg.norm(one) / np.linalg.norm(other))


@rest(SECONDS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", grid([8], [3, 512], FURTHER))
def test_embeddings_are_those_of_transformers(
    checkpoint: Checkpoints, family: str, kernels: str, chunk_size: int
) -> None:
    path, model = checkpoint(family)
    asked = prompts(8)
    states = [hidden(model, ids) for ids in asked]
    pooled = {"last": [each[-1] for each in states], "mean": [each.mean(0) for each in states]}
    with LLM(config(path, chunk_size=chunk_size, **KERNELS[kernels])) as llm:
        for _ in range(2):  # cold, then from the cache
            for pooling, wanted in pooled.items():
                found = llm.embed(asked, pooling=pooling, normalize=False)  # type: ignore[arg-type]
                for each, right in zip(found, wanted, strict=True):
                    assert cosine(each.vector, right) >= 0.9999
                    assert np.linalg.norm(each.vector) == pytest.approx(np.linalg.norm(right), rel=1e-3)
        assert sum(each.usage.cached_tokens for each in llm.embed(asked)) > 0
        tokens = llm.embed(asked[0], pooling="tokens", normalize=False).vector
        assert cosine(tokens, states[0]) >= 0.9999


async def test_embeddings_beside_a_chat_change_neither(checkpoint: Checkpoints) -> None:
    require_native()
    path, _ = checkpoint("qwen3")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    async with Engine(config(path, deterministic=True, chunk_size=8)) as engine:
        alone = await engine.generate([5, 6, 7], params)
        first = await engine.embed(prompts(6), pooling="mean")
        chat = engine.generate([5, 6, 7], params)
        beside = await engine.embed(prompts(6), pooling="mean")
        assert (await chat).token_ids == alone.token_ids
    for one, other in zip(first, beside, strict=True):
        assert np.array_equal(one.vector, other.vector)


def test_the_logits_of_chosen_tokens_are_those_of_the_head(checkpoint: Checkpoints) -> None:
    path, model = checkpoint("qwen3")
    with LLM(config(path)) as llm, torch.no_grad():
        found = llm.generate([[1, 2, 3]], pooling=Pooling("choices", (7, 1, 200)), progress=False)
        wanted = model(torch.tensor([[1, 2, 3]])).logits[0, -1, [7, 1, 200]]
    assert found[0].pooled == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-4)


# -- checkpoints without the head of a language model ------------------------------------------------------


def rewrite(path: Path, change: Callable[[str], str | None], **fields: Any) -> None:
    """Rename tensors, or leave them out, and set fields of the config."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {new: each for name, each in load_file(file).items() if (new := change(name)) is not None}
    save_file(tensors, file, {"format": "pt"})
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, **fields}))


def without_prefix(name: str) -> str | None:
    return None if name.startswith("lm_head") else name.removeprefix("model.")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_base_model_embeds_and_does_not_generate(tmp_path: Path, architecture: str, kernels: str) -> None:
    model = make_checkpoint("qwen3", tmp_path)
    tied = architecture == "Qwen3ForCausalLM"
    rewrite(tmp_path, without_prefix, architectures=[architecture], tie_word_embeddings=tied)
    with LLM(config(tmp_path, **KERNELS[kernels])) as llm:
        found = llm.embed([1, 2, 3], normalize=False).vector
        assert cosine(found, hidden(model, [1, 2, 3])[-1]) >= 0.9999
        assert llm.sentences.stated is False
        if tied:
            return
        assert architecture in llm._core.info.description
        with pytest.raises(InvalidRequest, match="no head for tokens"):
            llm.generate([1, 2, 3])


def make_classifier(path: Path, labels: int) -> Any:
    changes = {"head_dim": 16, "num_labels": labels, "tie_word_embeddings": False}
    make_model("Qwen3", changes, path, seed=3)
    shape = transformers.AutoConfig.from_pretrained(path)
    model = transformers.Qwen3ForSequenceClassification(shape).eval()
    model.config.pad_token_id = 0
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("labels", [1, 2, 5])
def test_a_classifier_gives_the_logits_of_its_classes(tmp_path: Path, labels: int, kernels: str) -> None:
    model = make_classifier(tmp_path, labels)
    with torch.no_grad():
        wanted = model(torch.tensor([[4, 5, 6]])).logits[0].numpy()
    with LLM(config(tmp_path, **KERNELS[kernels])) as llm:
        (found,) = llm.generate([[4, 5, 6]], pooling=Pooling("classes"), progress=False)
        assert found.pooled == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        with pytest.raises(InvalidRequest, match="no head for tokens"):
            llm.generate([1, 2, 3])


def test_the_score_of_a_classifier_is_what_its_files_make_of_the_logit(tmp_path: Path) -> None:
    model = make_classifier(tmp_path, 1)
    with_tokenizer(tmp_path)
    for stated, score in (
        (None, torch.sigmoid),
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
        ("torch.nn.modules.linear.Identity", torch.positive),
    ):
        if stated is not None:
            rewrite(tmp_path, lambda name: name, sentence_transformers={"activation_fn": stated})
        with LLM(config(tmp_path)) as llm, torch.no_grad():
            assert llm.tokenizer is not None
            wanted = float(score(model(torch.tensor([llm.tokenizer.encode("applepear")])).logits[0, 0]))
            assert llm.score("apple", ["pear"]).scores == [pytest.approx(wanted, rel=1e-3, abs=1e-4)]
    rewrite(tmp_path, lambda name: name, sentence_transformers={"activation_fn": "mine.Scaled"})
    with LLM(config(tmp_path)) as llm, pytest.raises(InvalidRequest, match="Scaled"):
        llm.score("apple", ["pear"])


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model", "Other"])
def test_a_model_that_is_not_causal_is_refused_by_any_name(tmp_path: Path, architecture: str) -> None:
    make_checkpoint("qwen3", tmp_path)
    rewrite(tmp_path, lambda name: name, architectures=[architecture], is_causal=False)
    with pytest.raises(ConfigError, match="attends to what follows"):
        LLM(config(tmp_path))


# -- what the model's files say -----------------------------------------------------------------------------


def with_tokenizer(path: Path, *words: str) -> None:
    """A token per byte, and one for each of ``words``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - len(words)]
    vocabulary = {each: index for index, each in enumerate([*letters, *words])}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    pieces = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))


def with_sentences(path: Path, pooling: dict[str, Any] | None, *modules: str, **prompts: Any) -> None:
    """The files of sentence-transformers; without ``pooling`` that file is missing."""
    kinds = ["Transformer", "Pooling", *modules]
    listed = [{"idx": at, "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def test_pooling_length_and_prompts_are_those_of_the_files(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path)
    with_tokenizer(tmp_path)
    asked = {"query": "find: ", "document": ""}
    with_sentences(tmp_path, {"pooling_mode_mean_tokens": True}, prompts=asked, default_prompt_name=None)
    with LLM(config(tmp_path)) as llm:
        assert llm.tokenizer is not None
        plain, query = llm.embed("apple"), llm.embed("apple", prompt_name="query")
        for found, text in ((plain, "apple"), (query, "find: apple")):
            wanted = hidden(model, llm.tokenizer.encode(text)).mean(0)
            assert found.vector == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        scores = llm.score("apple", ["find: apple", "pear"])
        pear = llm.embed("pear").vector
        assert scores.scores[0] == pytest.approx(1.0)
        assert scores.scores[1] == pytest.approx(cosine(query.vector, pear), abs=1e-5)
        with pytest.raises(InvalidRequest, match="query, document"):
            llm.embed("apple", prompt_name="other")


@pytest.mark.parametrize(
    ("prompts", "used"),
    [
        ({"passage": "p: "}, "p: "),
        ({"corpus": "c: ", "other": "o: "}, "c: "),
        ({"corpus": "c: ", "document": "d: ", "passage": "p: "}, "d: "),
        ({"other": "o: "}, ""),
    ],
)
def test_documents_have_the_prompt_for_them_whatever_it_is_called(
    tmp_path: Path, prompts: dict[str, str], used: str
) -> None:
    make_checkpoint("qwen3", tmp_path)
    with_tokenizer(tmp_path)
    with_sentences(tmp_path, {"pooling_mode_mean_tokens": True}, prompts={"query": "q: ", **prompts})
    with LLM(config(tmp_path)) as llm:
        (score,) = llm.score("apple", ["pear"]).scores
        query, document = llm.embed(["q: apple", f"{used}pear"])
        assert score == pytest.approx(cosine(query.vector, document.vector), abs=1e-5)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode_cls_token": True}, (), "sees no other"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, (), "pools by"),
        ({"pooling_mode": "weightedmean"}, (), "pools by"),
        ({"pooling_mode": "lasttoken"}, ("Dense", "Normalize"), "pass through Dense"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, (), "without the prompt's"),
        (None, (), "1_Pooling/config.json"),
    ],
)
def test_what_the_files_ask_for_and_is_not_computed_is_refused(
    tmp_path: Path, pooling: dict[str, Any] | None, modules: tuple[str, ...], message: str
) -> None:
    make_checkpoint("llama-mqa", tmp_path)
    with_sentences(tmp_path, pooling, *modules)
    with LLM(config(tmp_path)) as llm:
        with pytest.raises(InvalidRequest, match=message) as refused:
            llm.embed([1, 2])
        assert refused.value.field in ("model", "pooling")
        assert len(llm.embed([1, 2], pooling="last").vector) == 48


def make_judge(path: Path) -> Any:
    model = make_model("Qwen3", {"head_dim": 16, "max_position_embeddings": 512}, path, seed=5)
    with_tokenizer(path, "yes", "no")
    return model


def test_a_judge_answers_with_the_share_of_yes(tmp_path: Path) -> None:
    model = make_judge(tmp_path)
    documents = ["a fruit", "a {query} car"]
    with LLM(config(tmp_path, num_pages=600)) as llm, torch.no_grad():
        assert llm.tokenizer is not None
        scores = llm.score("apple", documents, instruction="Is it?")
        (yes,), (no,) = (llm.tokenizer.encode_part(word) for word in ("yes", "no"))
        for document, score in zip(documents, scores.scores, strict=True):
            text = _JUDGE.replace("{instruction}", "Is it?").replace("{query}", "apple")
            ids = llm.tokenizer.encode_part(text.replace("{document}", document))
            logits = model(torch.tensor([ids])).logits[0, -1]
            wanted = math.exp(logits[yes]) / (math.exp(logits[yes]) + math.exp(logits[no]))
            assert score == pytest.approx(wanted, rel=1e-3)
        assert scores.tokens[0] < scores.tokens[1]
        own = llm.score("apple", documents, template="{query}?{document}")
        assert own.scores != scores.scores
        for field, options in (
            ("template", {"template": "{query}"}),
            ("instruction", {"template": "{query}{document}", "instruction": "x"}),
            ("method", {"method": "classifier"}),
            ("method", {"method": "other"}),
        ):
            with pytest.raises(InvalidRequest) as refused:
                llm.score("apple", documents, **options)  # type: ignore[arg-type]
            assert refused.value.field == field


def with_answers(path: Path, *answers: int | None) -> None:
    """The files of a reranker of sentence-transformers."""
    listed = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_LogitScore").mkdir(exist_ok=True)
    stated = dict(zip(("true_token_id", "false_token_id"), answers, strict=True))
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(stated))


def test_a_reranker_by_its_files_judges_by_their_tokens(tmp_path: Path) -> None:
    model = make_judge(tmp_path)
    pairs: Any = ("apple", ["a fruit", "a car"])
    with LLM(config(tmp_path, num_pages=600)) as llm:
        assert llm.tokenizer is not None
        (yes,), (no,) = (llm.tokenizer.encode_part(word) for word in ("yes", "no"))
        wanted = llm.score(*pairs, method="judge").scores
        with pytest.raises(InvalidRequest, match="do not say how it scores") as refused:
            llm.score(*pairs)
        assert refused.value.field == "method"
    with_answers(tmp_path, yes, no)
    with LLM(config(tmp_path, num_pages=600)) as llm:
        assert llm.score(*pairs).scores == pytest.approx(wanted)
    with_answers(tmp_path, 7, 9)
    with LLM(config(tmp_path, num_pages=600)) as llm, torch.no_grad():
        with pytest.raises(InvalidRequest, match="tokens 7 and 9") as refused:
            llm.score(*pairs)
        assert refused.value.field == "template"
        assert llm.tokenizer is not None
        logits = model(torch.tensor([llm.tokenizer.encode_part("apple?pear")])).logits[0, -1]
        (score,) = llm.score("apple", ["pear"], template="{query}?{document}").scores
        assert score == pytest.approx(float(torch.sigmoid(logits[7] - logits[9])), rel=1e-3)
    with_answers(tmp_path, 7, None)
    with LLM(config(tmp_path, num_pages=600)) as llm, pytest.raises(InvalidRequest, match="logit of token 7"):
        llm.score(*pairs, template="{query}?{document}")
