"""Headless: checkpoints of embedding models and classifiers, as those of the language model that they are.

An embedding model is a language model without its head (``Qwen3Model``), a classifier has another one in its
place (``Qwen3ForSequenceClassification``: ``score.weight``, a row for each class). Their layers are those of
the family, so :func:`with_head` makes of such a checkpoint what one of the language model would be, with the
embedding as its head, which nothing uses. The tensors of base models have no ``model.`` in front of their
names, also where the config names the language model (Qwen3-Embedding).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.files import Checkpoint, Directory
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError
from aioinfer.model.renamed_tensors import RenamedTensors

if TYPE_CHECKING:
    import torch

    from aioinfer.model.weights import RandomWeights, Weights

__all__ = ["SCORE", "Classifier", "Headless", "with_head", "with_prefix", "without_score"]

#: the head of a classifier
SCORE = "score.weight"
_WORDS, _PREFIX = "embed_tokens.weight", "model."
#: prefixes in the language model alone, not in its base
_OUTSIDE = ("lm_head.", "score.")


@dataclass(frozen=True, slots=True)
class Classifier:
    """A head [classes, hidden] of hidden states. Computes in float64: a row's result then hardly depends on
    other rows."""

    weight: torch.Tensor

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        return len(self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, hidden] to logits, float32 [S, classes]."""
        return (hidden.double() @ self.weight.T).float()


class Headless(Directory):
    """The directory of a model without the head of a language model."""

    def __init__(self, checkpoint: Directory, architecture: str, *, classifies: bool) -> None:
        super().__init__(checkpoint.path)
        self._checkpoint = checkpoint
        #: the config's architecture
        self.architecture = architecture
        self._classifies = classifies

    def tensors(self) -> Tensors:
        return self._checkpoint.tensors()

    def classifier(self, config: Any, weights: Weights | RandomWeights) -> Classifier | None:
        """Its head, if it classifies. Raises ConfigError."""
        import torch

        if not self._classifies:
            return None
        weight = weights.take(SCORE, (config.num_labels, config.hidden_size), dtype=torch.float32)
        return Classifier(weight.double())


def with_head(checkpoint: Checkpoint, config: Any, known: Collection[str]) -> tuple[Checkpoint, Any]:
    """A model without the head of a language model as one with it, and its config; any other as it is.

    ``known``: architectures of language models that can be computed so. Raises ConfigError for one whose
    attention sees what follows.
    """
    architecture, kind = config.architectures[0], config.model_type
    language = architecture
    if architecture not in known:
        with importing_transformers():
            from transformers.models.auto import modeling_auto as auto

        language = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    sees_all = getattr(config, "is_causal", True) is False
    # Families that have both kinds of attention know their own field.
    own = getattr(config, "use_bidirectional_attention", None) is not None
    if sees_all and not own and language in known:
        # For any name of the architecture: embedding models keep the name of the language model, too.
        raise ConfigError(
            f"model: {architecture} attends to what follows (is_causal), which is not supported"
        )
    if language == architecture or language not in known or not isinstance(checkpoint, Directory):
        return checkpoint, config
    base = architecture == auto.MODEL_MAPPING_NAMES.get(kind)
    classifies = architecture == auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    if not (base or classifies):
        return checkpoint, config
    if sees_all or getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"model: {architecture} attends to what follows, which is not supported")
    config.architectures = [language]
    config.tie_word_embeddings = True
    return Headless(checkpoint, architecture, classifies=classifies), config


def with_prefix(tensors: Tensors, known: Collection[str] = ()) -> Tensors:
    """The tensors of a checkpoint under the names that they have in a language model. ``known``: all such
    names, for tensors that are not a whole checkpoint."""
    names = tensors.names
    bare = _WORDS in names and f"{_PREFIX}{_WORDS}" not in names
    if not bare and not (known and _all_bare(names, known)):
        return tensors
    return RenamedTensors(
        tensors, {name if name.startswith(_OUTSIDE) else f"{_PREFIX}{name}": name for name in names}
    )


def _all_bare(names: Collection[str], known: Collection[str]) -> bool:
    inner = [name for name in names if not name.startswith(_OUTSIDE)]
    return bool(inner) and all(name not in known and f"{_PREFIX}{name}" in known for name in inner)


def without_score(tensors: Tensors) -> Tensors:
    """The tensors of a classifier but for its head."""
    return RenamedTensors(tensors, {name: name for name in tensors.names if name != SCORE})
