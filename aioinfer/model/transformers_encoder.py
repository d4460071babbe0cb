"""TransformersEncoder: text encoders of transformers (BERT: MiniLM, BGE, E5), which see a whole text at once.

They run as other models do: packed rows, paged KV, one forward a step. A query attends to all of its own row,
as within the block of a diffusion model that is as long as the longest text; so a text is one row, never cut
into chunks, and its KV is of no use to others. There is no head for tokens: they embed, and generate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.selfcheck import check_whole
from aioinfer.model.spec import ModelSpec, Progress
from aioinfer.model.transformers_model import PAGED, Attend, attending, loaded, paged, random_model, register
from aioinfer.model.vision.base import Encoder
from aioinfer.model.weights import RandomWeights

if TYPE_CHECKING:
    from aioinfer.model.adapters.base import AdapterSlots
    from aioinfer.model.spec import Recipe

__all__ = ["TransformersEncoder", "is_encoder"]

#: architectures whose positions and attention are as plain as that
_ARCHITECTURES = frozenset({"BertModel"})


def is_encoder(config: Any) -> bool:
    """Whether a config is that of an encoder which can be computed here."""
    return config.architectures[0] in _ARCHITECTURES and not config.is_decoder


class TransformersEncoder:
    """A :class:`~aioinfer.model.spec.CausalLM` that embeds only."""

    capturable = False
    invariant = False
    adapters: AdapterSlots | None = None
    adapter_reason = "encoders have none"
    updates: Recipe | None = None
    encoder: Encoder | None = None
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        path: Path,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        random_weights: RandomWeights | None = None,
    ) -> None:
        """Raise ConfigError if transformers cannot load it, or if it differs over paged KV."""
        register()
        self.classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
        progress = progress or (lambda stage, done, total: None)
        progress("weights", 0, 1)
        self._model = _load(path, config, dtype, random_weights).eval().to(device)
        progress("weights", 1, 1)
        self._positions: int = config.max_position_embeddings
        heads: int = config.num_attention_heads
        layers = (KVShape(heads, config.hidden_size // heads),) * config.num_hidden_layers
        name = config.architectures[0]
        prompts = [torch.arange(start, start + 9, device=device) % config.vocab_size for start in (1, 11)]
        with torch.no_grad():
            self._model.set_attn_implementation("eager")
            expected = [self._run(ids, torch.arange(len(ids), device=device)) for ids in prompts]
            self._model.set_attn_implementation(PAGED)
            check_whole(name, self._hidden, layers, prompts, expected, dtype)
        self.spec = ModelSpec(
            architecture=name,
            num_layers=len(layers),
            kv_layers=layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=self._positions,
            dtype=dtype,
            eos_token_ids=frozenset(),
            num_parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            generates=False,
            whole_prompts=True,
        )

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Compute hidden states; there are no logits."""
        hidden = self._hidden(batch, attention)
        if batch.hidden_rows is not None:
            batch.hidden = hidden[batch.hidden_rows].float()
        return hidden.new_zeros(len(batch.logits_rows), self.spec.vocab_size)

    def _hidden(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self._run(batch.input_ids, batch.positions, paged(batch, attention, self._positions))

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
        with attending(attend):
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                token_type_ids=torch.zeros_like(ids)[None],
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def _load(path: Path, config: Any, dtype: torch.dtype, random_weights: RandomWeights | None) -> Any:
    """The model without the pooling layer, which checkpoints may lack. Raises ConfigError."""
    with importing_transformers():
        from transformers import AutoModel

    if random_weights is not None:
        made = random_model(config, dtype, torch.device("cpu"), random_weights, AutoModel)
    else:
        made = loaded(path, dtype, config, None, AutoModel, optional="pooler.")
    made.pooler = None
    return made
