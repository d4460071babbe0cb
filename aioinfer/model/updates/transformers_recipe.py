"""TransformersRecipe: new weights for a model of transformers' own code, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aioinfer.checkpoint.files import Checkpoint
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError
from aioinfer.ledger import LEDGER, Share
from aioinfer.model.multimodal import TextPart
from aioinfer.model.spec import CausalLM, Change, NewTensors
from aioinfer.model.transformers_model import TransformersLM, loaded
from aioinfer.model.updates.recipe import check_config
from aioinfer.model.updates.tensors import GivenTensors, check_values

__all__ = ["TransformersRecipe"]


@dataclass(frozen=True, slots=True)
class TransformersRecipe:
    """Updates a model of transformers' code. A checkpoint is read into memory beside the model, by
    transformers, which knows how its tensors are stored."""

    config: Any
    dtype: torch.dtype
    #: a checkpoint and its config
    open: Callable[[Path], tuple[Checkpoint, Any]]
    #: takes the tensors of the text model from a multimodal one
    part: Callable[[Tensors], Tensors] | None

    def prepare(
        self, model: CausalLM, given: NewTensors, go_on: Callable[[], None], copies: Share
    ) -> Iterable[Change]:
        assert isinstance(model, TransformersLM)
        state = model.state()
        if isinstance(given, Path):
            LEDGER.claim(copies, sum({each.data_ptr(): each.nbytes for each in state.values()}.values()))
            new: Tensors = GivenTensors([*self._loaded(given).items()])
            copies.taken = copies.promised
        else:
            new = GivenTensors(given)
            new = new if self.part is None else self.part(new)
        return _changes(state, new, go_on)

    def _loaded(self, path: Path) -> Mapping[str, torch.Tensor]:
        if path.suffix == ".safetensors":
            raise ConfigError("model: for transformers' code, the whole directory of a checkpoint is needed")
        checkpoint, config = self.open(path)
        check_config(self.config, config)
        quantised = getattr(config, "quantization_config", None) is not None
        part = checkpoint.tensors() if quantised or isinstance(checkpoint, TextPart) else None
        state: Mapping[str, torch.Tensor] = loaded(checkpoint.path, self.dtype, config, part).state_dict()
        return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def _changes(state: Mapping[str, torch.Tensor], new: Tensors, go_on: Callable[[], None]) -> Iterable[Change]:
    written: dict[int, str] = {}
    for name in new.names:
        if name not in state:
            raise ConfigError(f"model: the model has no tensor {name}")
        old = state[name]
        if new.shape(name) != tuple(old.shape):
            raise ConfigError(f"model: {name} is shaped {new.shape(name)}, the model's {tuple(old.shape)}")
        # Tied tensors are one, under several names.
        other = written.setdefault(old.data_ptr(), name)
        if other != name and not torch.equal(new.read(name), new.read(other)):
            raise ConfigError(f"model: {name} is not {other}, and the model has one tensor for both")
    check_values(new, {name: state[name].dtype for name in new.names}, go_on)
    return [partial(state[name].copy_, new.read(name)) for name in written.values()]
