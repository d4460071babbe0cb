"""The tokenizer of a GGUF file: a vocabulary, merges or scores, and a chat template.

A file names the rule by which text is cut before tokens are merged (``tokenizer.ggml.pre``); a rule that is
not known here is an error: text would be cut otherwise than the model has learned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from aioinfer.checkpoint.gguf.config import ADDED, CONTROL
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.errors import ConfigError, shown

__all__ = ["tokenizer_of"]

_log = logging.getLogger("aioinfer")
_KINDS = "tokenizer.ggml.token_type"
#: control tokens of Phi-3 after which white space is text
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
#: characters of a piece of SentencePiece; longer ones are whole tokens that nothing is merged into
_LONGEST_PIECE = 128
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
#: how the tokenizers of these models cut words, numbers and the rest
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _LETTERS + r"\p{N}{1,3}" + _REST
_QWEN2 = _LETTERS + r"\p{N}" + _REST
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES


def _by_case(ending: str, numbers: str, but: str = "", after: str = r"[\r\n/]*") -> str:
    """Words begin with a capital or have capitals only; ``ending``: contractions that belong to them;
    ``but``: letters that do not; ``after``: what belongs to signs."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
    return rf"{word}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{after}" + _SPACES


_TEKKEN, _GPT4O = _by_case("", r"\p{N}"), _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
#: signs and letters of East Asia in Youtu-LLM
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_KIMI = r"\p{Han}+|" + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
#: signs that Unicode does not count as punctuation
_SIGNS = r"\$\+<=>\^~\|"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
#: those of ASCII, wide ones, quotation marks, and those of Chinese
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
#: letters that have a case, of the Unicode of DeepSeek's tokenizer
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def _cuts(*patterns: str, late: tuple[str, ...] = (), composed: bool = False) -> Callable[[Any], Any]:
    """Text is cut at each match of the first pattern, then all parts at those of the next one; ``late``:
    patterns of bytes as byte-level vocabularies write them."""

    def make(tokenizer: Any) -> Any:
        from tokenizers import Regex, normalizers, pre_tokenizers

        if composed:
            tokenizer.normalizer = normalizers.NFC()
        early, last = (
            [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in each]
            for each in (patterns, late)
        )
        return pre_tokenizers.Sequence([*early, pre_tokenizers.ByteLevel(False, use_regex=False), *last])

    return make


#: those whose vocabulary has whole words that merges do not lead to, and whose texts begin with a token
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0")
#: by ``tokenizer.ggml.pre``
_CUTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum"), _cuts(_GPT2)),
    **dict.fromkeys(("granite-docling", "jais", "trillion"), _cuts(_GPT2)),
    **dict.fromkeys(("mpt", "olmo"), _cuts(_GPT2, composed=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _cuts(r"\p{N}", _GPT2)
    ),
    "command-r": _cuts(r"\p{N}", _GPT2, composed=True),
    "falcon": _cuts(rf"[\p{{P}}{_SIGNS}`]+", _GPT2, late=(r"\p{N}+", _THREE_DIGITS)),
    # What llama.cpp takes where a file names none.
    "default": _cuts(rf"[\p{{P}}{_SIGNS}]+", _GPT2, r"\p{N}+", _THREE_DIGITS),
    **dict.fromkeys((*_LIKE_LLAMA3, "smaug-bpe", "dbrx", "glm4", "glm5", "chatglm-bpe"), _cuts(_LLAMA3)),
    "minicpm5": _cuts(r"\p{N}{1,3}", _LETTERS + r"\p{N}+" + _REST),
    "seed-coder": _cuts(_LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _cuts(_BAILING)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _cuts(_BLOOM)),
    "viking": _cuts(_BLOOM, r"\p{N}"),
    "kimi-k2": _cuts(_KIMI),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _cuts(_QWEN2, composed=True)),
    **dict.fromkeys(("hunyuan", "grok-2", "solar-open", "stablelm2"), _cuts(_QWEN2)),
    "qwen35": _cuts(_QWEN35, composed=True),
    "tekken": _cuts(_TEKKEN),
    "youtu": _cuts(_YOUTU, _by_case(f"{_CONTRACTIONS}?", r"\p{N}")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _cuts(_GPT4O)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _cuts(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "deepseek-llm": _cuts(
        r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", _HAN, r"\p{N}",
    ),
    "deepseek-coder": _cuts(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        _cuts(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    ),
}  # fmt: skip
#: by architecture, of files that name none: those that can have no other
_RULES = {"gpt2": "gpt-2", "qwen2": "qwen2", "gptneox": "olmo", "starcoder2": "starcoder"}
#: those whose texts begin with a token
_BEGUN = {*_LIKE_LLAMA3, "tekken"}
#: those with whole words that merges do not lead to
_WHOLE_WORDS = {*_BEGUN, "smaug-bpe", "glm4", "glm5", "minicpm5", "kimi-k2", "youtu"}


def tokenizer_of(file: GGUFFile) -> Any | None:
    """A tokenizer of transformers; None if the file has none. Raises ConfigError."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return None
    kind = file.value("tokenizer.ggml.model", str)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file)
        elif kind == "llama":
            tokenizer = _sentence_pieces(file, *_scored(file))
        elif kind == "gemma4":
            tokens = _texts(file, "tokenizer.ggml.tokens")
            tokenizer = _sentence_pieces(file, tokens, _stated_merges(file, tokens))
        else:
            raise ConfigError(f"model: tokenizers of the kind {shown(kind)} in GGUF files are not supported")
        _add_tokens(tokenizer, file)
        return _wrapped(tokenizer, file)
    except ConfigError:
        raise
    except Exception as error:
        # The Rust library raises the bare Exception.
        raise ConfigError(f"model: the tokenizer of the GGUF file could not be made: {error}") from error


def _texts(file: GGUFFile, name: str) -> list[str]:
    found: list[str] = file.value(name, list)
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"model: {name} of the GGUF file is no list of texts")
    return found


def _byte_level(file: GGUFFile) -> Any:
    """Merges of bytes, as GPT-2 has them."""
    from tokenizers import Tokenizer, decoders, models

    if "tokenizer.ggml.pre" not in file.metadata and file.metadata["general.architecture"] not in _RULES:
        _log.warning("the GGUF file does not say how it cuts text; it is cut as llama.cpp does without")
    rule = _RULES.get(file.value("general.architecture", str), "default")
    pre = file.value("tokenizer.ggml.pre", str, rule)
    cut = _CUTS.get(pre)
    if cut is None:
        raise ConfigError(
            f"model: the GGUF file cuts text by the rule {shown(pre)}, which is not known: "
            f"{', '.join(_CUTS)} are"
        )
    tokens = _texts(file, "tokenizer.ggml.tokens")
    model = models.BPE(
        {token: at for at, token in enumerate(tokens)}, _stated_merges(file, tokens),
        fuse_unk=False, byte_fallback=False, ignore_merges=pre in _WHOLE_WORDS,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    _begin(tokenizer, file, default=pre in _BEGUN)
    return tokenizer


def _stated_merges(file: GGUFFile, tokens: list[str]) -> list[tuple[str, str]]:
    vocabulary = {*tokens}
    merges = [
        (left, right) for left, _, right in (m.partition(" ") for m in _texts(file, "tokenizer.ggml.merges"))
    ]
    # The library panics at one that is missing.
    if not all(vocabulary >= {left, right, left + right} for left, right in merges):
        raise ConfigError("model: tokenizer.ggml.merges of the GGUF file name tokens that it does not have")
    return merges


def _scored(file: GGUFFile) -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces of SentencePiece's kind BPE, and merges: pairs merge by the score of what they make."""
    tokens, scores = _texts(file, "tokenizer.ggml.tokens"), file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ConfigError(f"model: the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    tokens, scores = [*tokens], [*scores]
    for at, (token, kind) in enumerate(zip(tokens, file.value(_KINDS, list, []), strict=False)):
        if _is_spaces(token, kind):
            tokens[at], scores[at] = "▁" * len(token), 0.0
    return tokens, _merges(tokens, scores, {token: at for at, token in enumerate(tokens)})


def _sentence_pieces(file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]]) -> Any:
    """Pieces of text with a sign for spaces; what they do not have is written as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: at for at, token in enumerate(tokens)}
    unknown = tokens[file.value("tokenizer.ggml.unknown_token_id", int, 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prefixed else []), spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    _begin(tokenizer, file, default=True)
    return tokenizer


def _is_spaces(token: str, kind: int) -> bool:
    """Whether a token is a run of spaces that its model's authors have added. Converters write those as they
    occur in texts; the model knows them, as all others, with the sign for a space, and before all others."""
    return kind == ADDED and token != "" and not token.strip(" ")


def _merges(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the highest score first, as SentencePiece merges them; of pairs
    of the same score those that are longest on the left, as transformers sorts them: runs of a character
    then become long tokens before short ones."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _LONGEST_PIECE:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, -cut, cut - len(token), left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _begin(tokenizer: Any, file: GGUFFile, *, default: bool) -> None:
    """Have texts begin and end with the tokens that the file states."""
    from tokenizers import processors

    tokens = _texts(file, "tokenizer.ggml.tokens")
    before: list[str] = []
    after: list[str] = []
    special = []
    for name, parts, stated in (("bos", before, default), ("eos", after, False)):
        at = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        added = file.value(f"tokenizer.ggml.add_{name}_token", bool, stated)
        # The first files of Gemma 4 deny it.
        added = added or (name == "bos" and file.metadata["tokenizer.ggml.model"] == "gemma4")
        if added and isinstance(at, int) and at >= 0:
            parts.append(tokens[at])
            special.append((tokens[at], at))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=special,
        )  # fmt: skip


def _add_tokens(tokenizer: Any, file: GGUFFile) -> None:
    """Have control tokens and added ones encode as a whole."""
    from tokenizers import AddedToken

    tokens = _texts(file, "tokenizer.ggml.tokens")
    marked = list(zip(tokens, file.value(_KINDS, list, []), strict=False))
    scored = file.metadata["tokenizer.ggml.model"] == "llama"
    # Files do not say that white space after these tokens is not text.
    strips = scored and file.value("general.architecture", str) == "phi3"

    def added(token: str, *, special: bool) -> AddedToken:
        rstrip = strips and token not in _KEEP_SPACE
        return AddedToken(token, normalized=False, special=special, rstrip=rstrip)

    tokenizer.add_special_tokens([added(token, special=True) for token, kind in marked if kind == CONTROL])
    further = [token for token, kind in marked if kind == ADDED and not (scored and _is_spaces(token, kind))]
    tokenizer.add_tokens([added(token, special=False) for token in further])


def _wrapped(tokenizer: Any, file: GGUFFile) -> Any:
    with importing_transformers():
        from transformers import PreTrainedTokenizerFast

    tokens = _texts(file, "tokenizer.ggml.tokens")
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {}
    for name, stated in named.items():
        at = file.metadata.get(f"tokenizer.ggml.{stated}_token_id")
        if isinstance(at, int) and 0 <= at < len(tokens):
            special[f"{name}_token"] = tokens[at]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=_templates(file),
        **special,
    )


def _templates(file: GGUFFile) -> str | dict[str, str] | None:
    prefix = "tokenizer.chat_template"
    main = file.metadata.get(prefix)
    others = {
        name.removeprefix(f"{prefix}."): value
        for name, value in file.metadata.items()
        if name.startswith(f"{prefix}.") and isinstance(value, str)
    }
    if not isinstance(main, str):
        return None
    return {"default": main, **others} if others else main
