"""The tokenizer of a GGUF file: a vocabulary, merges or scores, and a chat template.

A file names the rule by which text is cut before tokens are merged (``tokenizer.ggml.pre``); a rule that is
not known here is an error: text would be cut otherwise than the model has learned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioinfer.checkpoint.gguf_config import ADDED, CONTROL
from aioinfer.checkpoint.gguf_file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["tokenizer_of"]

_KINDS = "tokenizer.ggml.token_type"
#: control tokens of Phi-3 after which white space is text
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
#: characters of a piece of SentencePiece; longer ones are whole tokens that nothing is merged into
_LONGEST_PIECE = 128
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: how the tokenizers of these models cut words, numbers and the rest
_LLAMA3 = _LETTERS + r"\p{N}{1,3}" + _REST
_QWEN2 = _LETTERS + r"\p{N}" + _REST


def _gpt2(_: Any) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits(tokenizer: Any) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2(tokenizer)])


def _by_pattern(pattern: str, *, composed: bool = False) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        from tokenizers import Regex, normalizers, pre_tokenizers

        if composed:
            tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])

    return make


#: by ``tokenizer.ggml.pre``
_CUTS: dict[str, Callable[[Any], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _digits,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _by_pattern(_LLAMA3)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _by_pattern(_QWEN2, composed=True)),
}
#: by architecture, of files that name none: those that can have no other
_RULES = {"gpt2": "gpt-2", "qwen2": "qwen2"}
#: those whose texts begin with a token
_BEGUN = {"llama-bpe", "llama3", "llama-v3"}
#: those whose vocabulary, which is Llama 3's, has whole words that merges do not lead to
_WHOLE_WORDS = {*_BEGUN, "smaug-bpe"}


def tokenizer_of(file: GGUFFile) -> Any | None:
    """A tokenizer of transformers; None if the file has none. Raises ConfigError."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return None
    kind = file.value("tokenizer.ggml.model", str)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file)
        elif kind == "llama":
            tokenizer = _sentence_pieces(file)
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

    pre = file.value("tokenizer.ggml.pre", str, _RULES.get(file.value("general.architecture", str)))
    cut = _CUTS.get(pre)
    if cut is None:
        raise ConfigError(
            f"model: the GGUF file cuts text by the rule {shown(pre)}, which is not known: "
            f"{', '.join(_CUTS)} are"
        )
    vocabulary = {token: at for at, token in enumerate(_texts(file, "tokenizer.ggml.tokens"))}
    merges = [merge.partition(" ")[::2] for merge in _texts(file, "tokenizer.ggml.merges")]
    # The library panics at one that is missing.
    if not all(vocabulary.keys() >= {left, right, left + right} for left, right in merges):
        raise ConfigError("model: tokenizer.ggml.merges of the GGUF file name tokens that it does not have")
    model = models.BPE(
        vocabulary, merges, fuse_unk=False, byte_fallback=False, ignore_merges=pre in _WHOLE_WORDS
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    _begin(tokenizer, file, default=pre in _BEGUN)
    return tokenizer


def _sentence_pieces(file: GGUFFile) -> Any:
    """Pieces with scores, of SentencePiece's kind BPE: pairs merge by the score of what they make."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = _texts(file, "tokenizer.ggml.tokens"), file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ConfigError(f"model: the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    tokens, scores = [*tokens], [*scores]
    for at, (token, kind) in enumerate(zip(tokens, file.value(_KINDS, list, []), strict=False)):
        if _is_spaces(token, kind):
            tokens[at], scores[at] = "▁" * len(token), 0.0
    vocabulary = {token: at for at, token in enumerate(tokens)}
    unknown = tokens[file.value("tokenizer.ggml.unknown_token_id", int, 0)]
    model = models.BPE(
        vocabulary, _merges(tokens, scores, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
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
        if file.value(f"tokenizer.ggml.add_{name}_token", bool, stated) and isinstance(at, int):
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
