"""Tokenizers of SentencePiece's kind in GGUF files: the ids are those of transformers' tokenizers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges

from aioinfer.checkpoint.files import GGUFCheckpoint
from aioinfer.checkpoint.gguf.config import end_tokens
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError
from aioinfer.text.tokenizer import HFTokenizer
from tests.checkpoint.gguf_models import write_file

TEXTS = [
    "Hello, world!", "two  spaces   three", " " * 9, " ", "", "\n", "\n" * 7, "line\nline\n\n  indented\r\n",
    "\ttabs\tand more", "naïve Ünï — e\u0301", "日本語のテキスト", "кириллица и ελληνικά", "مرحبا بالعالم",
    "🙂🚀👩‍👩‍👧", "def f(x):\n    return x ** 2  # 100%", "12345 3.14", "a▁b ▁ c", "\x00\x7f", "<b>bold</b>",
    "<start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\n", "<bos>x<eos>", "  <end_of_turn>  ",
]  # fmt: skip
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
#: as the releases have them: whole whenever they occur
DEFINED = ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<b>", "</b>"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def pieces(seed: int) -> list[tuple[str, float, int]]:
    """A small vocabulary as Gemma's: controls, pieces of the user, bytes, and what a training finds."""
    rng = random.Random(seed)
    words = [word for text in TEXTS for word in text.replace("▁", "").split()]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    texts = [" ".join(rng.choices(words, k=40)) for _ in range(200)]
    alphabet = sorted(set("".join(words)) - set("👧\u0301م"))
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 150,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet) + 1,
    )
    trained.train_from_iterator(texts, trainer)
    found = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    learned = [token for token in found if token not in DEFINED]
    return [
        *((token, 0.0, UNKNOWN if token == "<unk>" else CONTROL) for token in CONTROLS),
        *((token, 0.0, USER_DEFINED) for token in DEFINED),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((token, -float(rank), NORMAL) for rank, token in enumerate(learned, 1)),
    ]


def gemma(made: list[tuple[str, float, int]], *, whole: bool) -> Any:
    """transformers' tokenizer of a vocabulary, as its converter makes it of a trained model; ``whole``: and
    as it is published, with the pieces of the user as added tokens."""
    vocabulary = {token: at for at, (token, _, _) in enumerate(made)}
    merges = generate_merges(vocabulary, {token: score for token, score, _ in made})
    special = ["<start_of_turn>", "<end_of_turn>"]
    found = transformers.GemmaTokenizer(
        vocabulary, merges, additional_special_tokens=special, add_bos_token=True
    )
    if whole:
        found.add_tokens([AddedToken(token, normalized=False) for token in DEFINED])
    return found


def metadata(made: list[tuple[str, float, int]], spaces: str) -> dict[str, Any]:
    """``spaces``: how pieces of the user state spaces: converters write them as such, and old ones wrote
    them, and all pieces of the user, as any other piece."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            token.replace("▁", spaces) if kind == USER_DEFINED else token for token, _, kind in made
        ],
        "tokenizer.ggml.scores": [score for _, score, _ in made],
        "tokenizer.ggml.token_type": [
            NORMAL if kind == USER_DEFINED and spaces == "▁" else kind for _, _, kind in made
        ],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


@pytest.mark.parametrize("spaces", [" ", "▁"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tokenizer_of_gemma_encodes_as_transformers_does(tmp_path: Path, seed: int, spaces: str) -> None:
    made = pieces(seed)
    oracle = gemma(made, whole=spaces == " ")
    assert oracle("a").input_ids[0] == 2
    write_file(tmp_path / "t.gguf", metadata(made, spaces))
    found = HFTokenizer.of(GGUFCheckpoint(tmp_path / "t.gguf"))
    assert found is not None
    rng = random.Random(seed)
    mixed = ["".join(rng.choices([*TEXTS, " ", "  "], k=4)) for _ in range(50)]
    for text in TEXTS + mixed:
        ids = found.encode(text)
        assert ids == oracle.encode(text), (seed, text)
        assert found.decode(ids) == oracle.decode(ids, skip_special_tokens=True), (seed, text)
    assert end_tokens(GGUFFile(tmp_path / "t.gguf")) == [1, CONTROLS.index("<end_of_turn>")]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tokenizer_of_gemma_4_has_its_merges_as_stated(tmp_path: Path, seed: int) -> None:
    made = pieces(seed)
    oracle = gemma(made, whole=False)
    vocabulary = {token: at for at, (token, _, _) in enumerate(made)}
    merges = generate_merges(vocabulary, {token: score for token, score, _ in made})
    stated = metadata(made, "▁") | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        # As the converter writes them.
        "tokenizer.ggml.scores": [-1000.0] * len(made),
    }
    del stated["tokenizer.ggml.pre"]
    # The first files say that texts do not begin with a token; llama.cpp ignores it.
    write_file(tmp_path / "t.gguf", {**stated, "tokenizer.ggml.add_bos_token": False} if seed else stated)
    found = HFTokenizer.of(GGUFCheckpoint(tmp_path / "t.gguf"))
    assert found is not None
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == oracle.encode(text), (seed, text)
        assert found.decode(ids) == oracle.decode(ids, skip_special_tokens=True), (seed, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "of the kind 'bert' in GGUF files are not supported"),
        ({"tokenizer.ggml.merges": ["▁ no-such"]}, "name tokens that it does not have"),
        ({"tokenizer.ggml.merges": []}, "merges"),
        ({"tokenizer.ggml.unknown_token_id": 1 << 20}, "could not be made"),
    ],
)
def test_damaged_vocabularies_of_gemma_4_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stated = metadata(pieces(0), "▁") | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["a b"]}
    write_file(tmp_path / "t.gguf", stated | change)
    with pytest.raises(ConfigError, match=message):
        HFTokenizer.of(GGUFCheckpoint(tmp_path / "t.gguf"))


def phi3(tokens: list[str], scores: list[float], controls: list[str]) -> Tokenizer:
    """Phi-3's tokenizer as it is published, of a vocabulary."""
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kept = ("<unk>", "<s>", "<|endoftext|>")
    found.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=token not in kept) for token in controls]
    )
    return found


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_white_space_after_control_tokens_of_phi_3_is_no_text(tmp_path: Path, architecture: str) -> None:
    learned = [(token, score) for token, score, kind in pieces(3) if kind in (NORMAL, BYTE)]
    controls = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]
    tokens = [*controls, *(token for token, _ in learned)]
    scores = [-1000.0] * len(controls) + [score for _, score in learned]
    stated = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [CONTROL] * len(controls) + [NORMAL] * len(learned),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_file(tmp_path / "t.gguf", stated, architecture)
    found, oracle = HFTokenizer.of(GGUFCheckpoint(tmp_path / "t.gguf")), phi3(tokens, scores, controls)
    assert found is not None
    chat = "<|user|>\nHi there<|end|>\n<|assistant|>\n"
    if architecture == "phi3":
        for text in [*TEXTS, chat, chat + "  code\n", "<|endoftext|> x", "a</s>  b"]:
            assert found.encode(text) == [1, *oracle.encode(text).ids], text
        assert found.encode(chat)[-1] == controls.index("<|assistant|>")
    else:
        assert found.encode(chat) != [1, *oracle.encode(chat).ids]
    assert end_tokens(GGUFFile(tmp_path / "t.gguf")) == [2, 3, 5]


def test_turns_of_glm_4_end_where_the_next_one_begins(tmp_path: Path) -> None:
    stated = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"],
        "tokenizer.ggml.token_type": [CONTROL] * 4,
        "tokenizer.ggml.eos_token_id": 0,
    }
    for architecture, ends in (("glm4", [0, 1, 2]), ("llama", [0])):
        write_file(tmp_path / "t.gguf", stated, architecture)
        assert end_tokens(GGUFFile(tmp_path / "t.gguf")) == ends


@pytest.mark.parametrize(
    ("controls", "added", "ends"),
    [
        (
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
            [],
            "<|end_of_text|> <|eot_id|> <|eom_id|>",
        ),
        (["<bos>", "</s>", "<end_of_utterance>"], [], "</s> <end_of_utterance>"),
        (["[BOS]", "[EOS]", "[EOT]", "_<EOT>"], [], "[EOS] [EOT] _<EOT>"),
        # A message of Harmony ends before its turn does.
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>"], [], "<|return|> <|call|>"),
        (["<|end|>", "<|flush|>", "<|calls|>"], [], "<|flush|> <|calls|>"),
        (["<|end|>", "<|return|>"], [], "<|end|> <|return|>"),
        (["<turn|>", "<|tool_response>", "<eos>", "<|turn>"], [], "<turn|> <|tool_response> <eos>"),
        (["<｜end▁of▁sentence｜>", "[e~["], ["<|im_end|>"], "<｜end▁of▁sentence｜> [e~[ <|im_end|>"),
        # A tag of HTML, and texts of plain tokens.
        (["<eos>"], ["</s>", "<s>"], "<eos>"),
    ],
)
def test_ends_are_what_control_tokens_say(
    tmp_path: Path, controls: list[str], added: list[str], ends: str
) -> None:
    plain = ["a", "[EOT]x", "<|im_end|> "]
    stated = {
        "tokenizer.ggml.tokens": [*plain, *controls, *added],
        "tokenizer.ggml.token_type": [NORMAL] * 3 + [CONTROL] * len(controls) + [USER_DEFINED] * len(added),
        "tokenizer.ggml.eos_token_id": 3,
    }
    write_file(tmp_path / "t.gguf", stated)
    tokens = stated["tokenizer.ggml.tokens"]
    assert end_tokens(GGUFFile(tmp_path / "t.gguf")) == sorted({3, *map(tokens.index, ends.split())})
