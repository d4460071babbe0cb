"""Updates of a loaded model's weights: prepared beside running steps, installed between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aioinfer.checkpoint.files import Checkpoint
from aioinfer.checkpoint.tensors import SafetensorsTensors, Tensors
from aioinfer.errors import ConfigError, shown
from aioinfer.ledger import LEDGER, Share
from aioinfer.model.embedding_checkpoint import with_prefix
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.multimodal import TextPart
from aioinfer.model.spec import CausalLM, Change, NewTensors
from aioinfer.model.updates.new_weights import Known, NewWeights
from aioinfer.model.updates.rewriting import Rewriting
from aioinfer.model.updates.tensors import GivenTensors, check_values
from aioinfer.model.updates.vision_recipe import VisionRecipe

__all__ = ["Build", "DecoderRecipe", "PreparedUpdate", "check_config", "prepare_update"]

#: runs the code of a family over weights, with kernels
Build = Callable[[NewWeights, LayerKernels], CausalLM]
#: copies of a part while it is written: matrices that are joined or of another type, and packed
_COPIES = 4
#: Fields of a config that do not change how its tensors are read and computed with: names, types in files,
#: and tokens, which stay those of the checkpoint that was loaded.
_OF_NO_MATTER = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attn_implementation"),
        *("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config"),
        *("task_specific_params", "tie_word_embeddings", "tokenizer_class", "torch_dtype"),
        *("transformers_version", "use_cache"),
    }
)


class PreparedUpdate:
    """Weights that were read and checked; :meth:`install` writes them, once."""

    def __init__(self, changes: Iterable[Change], copies: Share) -> None:
        """``copies``: the memory that they take until they are written."""
        self._changes = [*changes]
        self._copies = copies

    @torch.no_grad()
    def install(self) -> None:
        """Write them. On the launch thread, between steps. After an exception the model is half changed."""
        changes = self._changes[::-1]
        self._changes = []
        while changes:
            changes.pop()()
        self._copies.close()


def prepare_update(model: CausalLM, given: NewTensors, go_on: Callable[[], None]) -> PreparedUpdate:
    """Read and check new weights without changing the model; on any thread but the launch thread. Takes as
    long as reading all of them. ``go_on`` is called again and again, and may raise. Raises ConfigError, which
    names the tensor, and OutOfMemory: what is copied does not fit."""
    recipe = model.updates
    if recipe is None:
        raise ConfigError(f"weights: those of {model.spec.architecture} cannot be replaced")
    copies = Share("update_weights")
    try:
        update = PreparedUpdate(recipe.prepare(model, given, go_on, copies), copies)
        if model.adapters is not None:
            model.adapters.replace_weights()
        return update
    except ConfigError as error:
        raise ConfigError(f"weights: {str(error).removeprefix('model: ')}") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"weights: they do not fit the model: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class DecoderRecipe:
    """Updates a model of a built-in family: the code that built it runs again, over the new tensors."""

    config: Any
    known: Known
    #: the kernels that made the model
    kernels: LayerKernels
    build: Build
    #: a checkpoint and its config
    open: Callable[[Path], tuple[Checkpoint, Any]]
    #: takes the tensors of the text model from a multimodal one
    part: Callable[[Tensors], Tensors] | None
    dtype: torch.dtype
    device: torch.device
    #: of the image encoder; None: there is none
    vision: VisionRecipe | None = None
    #: reason why it cannot be done; empty if it can
    refusal: str = ""

    def prepare(
        self, model: CausalLM, given: NewTensors, go_on: Callable[[], None], copies: Share
    ) -> Iterable[Change]:
        if self.refusal:
            raise ConfigError(f"model: {self.refusal}")
        tensors, others = self._opened(given)
        mapped, found = isinstance(given, Path), list[Change]()
        if self.vision is not None and others is not None and others.names:
            claim = partial(self._claim, copies)
            found = self.vision.changes(model, others, go_on, claim, mapped=mapped)
            if not tensors.names:
                return found
        if not mapped:
            # Whole sets may have another layout than the checkpoint had; what is not whole has the same.
            with suppress(ConfigError):
                return found + self._planned(model, tensors, go_on, copies, partial=False, mapped=False)
        return found + self._planned(model, tensors, go_on, copies, partial=not mapped, mapped=mapped)

    def _opened(self, given: NewTensors) -> tuple[Tensors, Tensors | None]:
        """The tensors of the text model, and those of the image encoder."""
        if not isinstance(given, Path) or (given.suffix == ".safetensors" and given.is_file()):
            tensors: Tensors = SafetensorsTensors(given) if isinstance(given, Path) else GivenTensors(given)
            others = None if self.vision is None else self.vision.part.of(tensors)
            return tensors if self.part is None else self.part(tensors), others
        checkpoint, config = self.open(given)
        check_config(self.config, config)
        others = None
        if self.vision is not None and isinstance(checkpoint, TextPart):
            part = self.vision.part
            check_config(part.config.vision_config, checkpoint.outer.vision_config)
            others = checkpoint.others(part.family.prefixes, part.family.renames)
        return checkpoint.tensors(), others

    def _planned(
        self,
        model: CausalLM,
        tensors: Tensors,
        go_on: Callable[[], None],
        copies: Share,
        *,
        partial: bool,
        mapped: bool,
    ) -> list[Change]:
        tensors = with_prefix(tensors, self.known.names)
        weights = NewWeights(
            tensors, self.known, partial=partial, mapped=mapped, dtype=self.dtype, device=self.device
        )
        rewriting = Rewriting(model, self.kernels, weights)
        go_on()
        self.build(weights, rewriting)
        weights.check_any()
        self._claim(copies, weights)
        check_values(tensors, weights.kinds, go_on, rewriting.kept)
        return rewriting.changes

    def _claim(self, copies: Share, weights: NewWeights) -> None:
        """Promise the memory in which parts are copied while they are written."""
        if self.device.type == "cpu":
            most = _COPIES * weights.largest * self.dtype.itemsize
            LEDGER.claim(copies, max(0, most - copies.promised))


def check_config(known: Any, found: Any) -> None:
    """Raise ConfigError if a checkpoint's config is not that of the model that is loaded."""
    before, after = _fields(known), _fields(found)
    for name in sorted(before.keys() | after.keys()):
        if name not in _OF_NO_MATTER and before.get(name) != after.get(name):
            values = f"{_shown(after.get(name))}, and the model's is {_shown(before.get(name))}"
            raise ConfigError(f"model: {name} of the config is {values}")


def _fields(config: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = config.to_dict()
    return fields


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and len(value) < 80 else shown(value)
