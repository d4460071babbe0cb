"""Scores: how well documents answer a query, by whatever of three kinds of model there is.

===========  =====================================================  =======================================
method       model                                                  score
===========  =====================================================  =======================================
classifier   a head of its own (``Qwen3ForSequenceClassification``)  the sigmoid of its logit, or the logit
                                                                    where its files say so; with two
                                                                    classes the softmax of the second
judge        a language model that answers "yes" or "no"            the probability of "yes" against "no"
             (Qwen3-Reranker)
cosine       an embedding model                                     the cosine of the two embeddings
===========  =====================================================  =======================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from aioinfer.checkpoint.sentences import Sentences
from aioinfer.embeddings.embedding import EmbeddingForm
from aioinfer.errors import AioInferError, InvalidRequest, shown
from aioinfer.loop.options import PromptForm
from aioinfer.outputs import Result, Usage
from aioinfer.pooling import Pooling

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["METHODS", "ScoreJob", "ScoreMethod", "ScoreOptions", "Scores", "bad_pairs", "score_job"]

ScoreMethod: TypeAlias = Literal["classifier", "judge", "cosine"]
METHODS: tuple[ScoreMethod, ...] = ("classifier", "judge", "cosine")

#: of Qwen3-Reranker, as its model card has it
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PLAIN = "{query}{document}"
_ANSWERS = ("yes", "no")
#: what models call their prompts for queries and for documents; the first one that is there counts
_QUERIES = ("query",)
_DOCUMENTS = ("document", "passage", "corpus")
_PLACES = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class Scores:
    """One score for each document, in their order."""

    scores: list[float]
    #: of all that was computed; of "cosine", texts that are equal are computed and counted once
    usage: Usage
    #: the tokens of what was computed for each document; of "cosine", those of its text
    tokens: list[int] = field(default_factory=list)
    #: of the weights that computed all of them
    weight_version: int = field(default=0, compare=False)
    #: what was computed
    method: ScoreMethod = "cosine"
    #: with ``on_error="return"``: the errors of documents that have no score, by index
    errors: Mapping[int, AioInferError] = field(default_factory=dict, compare=False)

    def ranking(self, top_n: int | None = None) -> list[int]:
        """The indices of the documents, best first, equal ones in their order; of the best ``top_n`` only.
        Documents without a score are left out."""
        scored = [index for index in range(len(self.scores)) if index not in self.errors]
        return sorted(scored, key=lambda index: -self.scores[index])[:top_n]

    @classmethod
    def with_errors(cls, some: Scores | None, errors: Mapping[int, AioInferError], count: int) -> Scores:
        """The scores of ``count`` documents: of ``some`` those without an error, NaN for the others."""
        some = some or cls([], Usage(0, 0))
        scores, tokens = iter(some.scores), iter(some.tokens)
        return replace(
            some,
            scores=[math.nan if at in errors else next(scores) for at in range(count)],
            tokens=[0 if at in errors else next(tokens) for at in range(count)],
            errors=dict(errors),
        )


class ScoreOptions(TypedDict, total=False):
    """Options of :meth:`aioinfer.Engine.score`."""

    method: ScoreMethod | None
    instruction: str | None
    template: str | None


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Prompts to compute, and how scores are made of their results."""

    prompts: list[str]
    pooling: Pooling
    #: how prompts become tokens; None: as usual
    form: PromptForm | None
    #: index of the document that a prompt belongs to; None: to the query
    documents: list[int | None]
    finish: Callable[[Sequence[Result]], Scores]
    #: which prompts the score of each document is made of
    needs: list[tuple[int, ...]]

    def name(self, index: int, kept: Sequence[int] | None = None) -> str:
        """The caller's name for a prompt; ``kept``: which of the caller's documents there are, None: all."""
        document = self.documents[index]
        if document is None:
            return "query"
        return f"documents[{document if kept is None else kept[document]}]"


def score_job(
    info: DeviceInfo,
    tokenizer: Tokenizer | None,
    sentences: Sentences,
    query: str | Sequence[str],
    documents: Sequence[str],
    *,
    method: str | None = None,
    instruction: str | None = None,
    template: str | None = None,
) -> ScoreJob:
    """A plan to score these documents; arguments as of :meth:`aioinfer.Engine.score`. Raises
    InvalidRequest."""
    pairs = _pairs(query, documents)
    if method is None:
        method = _method(info, sentences)
        if method == "judge" and sentences.answers is None and instruction is template is None:
            raise InvalidRequest(
                "method",
                "the files of the model do not say how it scores: with judge it answers yes or no to the "
                "prompt of Qwen3-Reranker, or to your template",
            )
    if method not in METHODS:
        raise InvalidRequest("method", f"must be one of {', '.join(METHODS)}, got {shown(method)}")
    if method == "cosine":
        for name, given in (("instruction", instruction), ("template", template)):
            if given is not None:
                raise InvalidRequest(name, "embeddings have none: put it in front of the query")
        return _cosine(info, sentences, pairs)
    if method == "classifier" and info.num_labels not in (1, 2):
        raise InvalidRequest("method", f"a classifier with {info.num_labels} classes gives no score")
    form = _template(template, _JUDGE if method == "judge" else _PLAIN)
    if instruction is not None and "{instruction}" not in form:
        raise InvalidRequest("instruction", "the template has no place for it")
    wanted = _INSTRUCTION if instruction is None else _text("instruction", instruction)
    prompts = [_filled(form, wanted, *pair) for pair in pairs]
    each: list[int | None] = [*range(len(pairs))]
    alone: list[tuple[int, ...]] = [(index,) for index in range(len(pairs))]
    if method == "classifier":
        raw = _is_raw(info, sentences)
        return ScoreJob(prompts, Pooling("classes"), None, each, partial(_of_classes, raw=raw), alone)
    answers = _answers(tokenizer, sentences, own_template=template is not None)
    form_of = PromptForm(special_tokens=False)
    return ScoreJob(prompts, Pooling("choices", answers), form_of, each, _of_choices, alone)


def _method(info: DeviceInfo, sentences: Sentences) -> ScoreMethod:
    """The method that the model is made for, as far as its files say."""
    if info.num_labels:
        return "classifier"
    return "cosine" if sentences.embeds or not info.generates else "judge"


def _is_raw(info: DeviceInfo, sentences: Sentences) -> bool:
    """Whether the score of a classifier is its logit as it is. Raises InvalidRequest."""
    if info.num_labels != 1 or sentences.activation == "Sigmoid":
        return False
    if sentences.activation != "Identity":
        message = f"its files make scores of logits by {sentences.activation}, which is not supported"
        raise InvalidRequest("model", message)
    return True


def _pairs(query: str | Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise InvalidRequest("documents", f"must be a list of texts, got {shown(documents)}")
    if not documents:
        raise InvalidRequest("documents", "is empty")
    texts = [_text(f"documents[{index}]", each) for index, each in enumerate(documents)]
    if isinstance(query, str):
        return [(_text("query", query), text) for text in texts]
    if not isinstance(query, Sequence) or len(query) != len(texts):
        raise InvalidRequest("query", f"must be a text, or one for each of {len(texts)} documents")
    queries = [_text(f"query[{index}]", each) for index, each in enumerate(query)]
    return [*zip(queries, texts, strict=True)]


def bad_pairs(query: Any, documents: Any) -> dict[int, AioInferError]:
    """The errors of single documents, and of queries that belong to them, by index; what is wrong with all
    is left to :func:`score_job`."""
    found: dict[int, AioInferError] = {}
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        return found
    several = isinstance(query, Sequence) and not isinstance(query, str) and len(query) == len(documents)
    for at, text in enumerate(documents):
        try:
            _text(f"documents[{at}]", text)
            if several:
                _text(f"query[{at}]", query[at])
        except InvalidRequest as error:
            found[at] = error
    return found


def _text(field_: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise InvalidRequest(field_, f"must be a text that is not empty, got {shown(given)}")
    return str(given)


def _template(given: str | None, usual: str) -> str:
    if given is None:
        return usual
    if not isinstance(given, str) or "{query}" not in given or "{document}" not in given:
        raise InvalidRequest("template", "must be a text with {query} and {document}")
    return str(given)


def _filled(template: str, instruction: str, query: str, document: str) -> str:
    """In one pass: what is put in is not searched for places."""
    found = {"instruction": instruction, "query": query, "document": document}
    return _PLACES.sub(lambda place: found[place[1]], template)


def _answers(tokenizer: Tokenizer | None, sentences: Sentences, *, own_template: bool) -> tuple[int, ...]:
    """The tokens that the model answers with: those of its files, else "yes" and "no". Raises
    InvalidRequest."""
    if tokenizer is None:
        raise InvalidRequest("method", "the model has no tokenizer, so it cannot answer yes or no")
    found = [tokenizer.encode_part(word) for word in _ANSWERS]
    words = tuple(ids[0] for ids in found) if all(len(ids) == 1 for ids in found) else ()
    stated = sentences.answers
    if stated is not None:
        if len(stated) < len(_ANSWERS):
            why = (
                f"by the logit of token {stated[0]} by itself"
                if stated
                else "by tokens of a file that is missing"
            )
            raise InvalidRequest("model", f"scores {why}, which is not supported")
        if stated != words and not own_template:
            message = "the model answers by tokens {} and {} to a prompt of its own: give that".format(
                *stated
            )
            raise InvalidRequest("template", message)
        return stated
    if len(set(words)) < len(_ANSWERS):
        raise InvalidRequest("method", "yes and no are no tokens of this model, which cannot judge")
    return words


# -- from what was pooled to scores -----------------------------------------------------------------------


def _of_choices(results: Sequence[Result]) -> Scores:
    scores = [_sigmoid(float(each.pooled[0]) - float(each.pooled[1])) for each in results]
    return _scores(results, scores, "judge")


def _of_classes(results: Sequence[Result], *, raw: bool) -> Scores:
    found = []
    for each in results:
        logits = [float(logit) for logit in each.pooled]
        if raw:
            found.append(logits[0])
            continue
        found.append(_sigmoid(logits[0] if len(logits) == 1 else logits[1] - logits[0]))
    return _scores(results, found, "classifier")


def _sigmoid(value: float) -> float:
    if value < 0:
        power = math.exp(value)
        return power / (1 + power)
    return 1 / (1 + math.exp(-value))


def _cosine(info: DeviceInfo, sentences: Sentences, pairs: Sequence[tuple[str, str]]) -> ScoreJob:
    """Every text once, with the model's own prompts for queries and documents."""
    names = [
        next((name for name in known if name in sentences.prompts), None) for known in (_QUERIES, _DOCUMENTS)
    ]
    forms = [EmbeddingForm.of(info, sentences, normalize=True, prompt_name=name) for name in names]
    at: dict[str, int] = {}
    documents: list[int | None] = []
    places: list[tuple[int, ...]] = []
    for index, (query, document) in enumerate(pairs):
        found = []
        for form, text, owner in ((forms[0], query, None), (forms[1], document, index)):
            prompt = str(form.prompt(text))
            if prompt not in at:
                at[prompt] = len(at)
                documents.append(owner)
            found.append(at[prompt])
        places.append((found[0], found[1]))

    def finish(results: Sequence[Result]) -> Scores:
        vectors = [forms[0].finish(each).vector for each in results]
        found = [float(vectors[first] @ vectors[second]) for first, second in places]
        tokens = [results[second].usage.prompt_tokens for _, second in places]
        return Scores(found, _usage(results), tokens, results[0].weight_version, "cosine")

    return ScoreJob(list(at), forms[0].pooling, forms[0].form, documents, finish, [*places])


def _scores(results: Sequence[Result], scores: list[float], method: ScoreMethod) -> Scores:
    tokens = [each.usage.prompt_tokens for each in results]
    return Scores(scores, _usage(results), tokens, results[0].weight_version, method)


def _usage(results: Sequence[Result]) -> Usage:
    return Usage(
        sum(each.usage.prompt_tokens for each in results),
        0,
        sum(each.usage.cached_tokens for each in results),
    )
