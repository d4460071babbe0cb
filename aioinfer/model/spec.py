"""ModelSpec and CausalLM: the interface between a model and the rest of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aioinfer.checkpoint.hub import Progress
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from aioinfer.images.support import ImageSupport
    from aioinfer.ledger import Share
    from aioinfer.model.adapters.base import AdapterSlots
    from aioinfer.model.attention.base import Attention
    from aioinfer.model.attention.pool import KVShape
    from aioinfer.model.batch import Batch
    from aioinfer.model.state import StateShape
    from aioinfer.model.vision.base import Encoder

__all__ = ["CausalLM", "Change", "ModelSpec", "NewTensors", "Progress", "Recipe", "eos_token_ids"]

_log = logging.getLogger("aioinfer")

#: new weights for a loaded model: a path, or names and tensors
NewTensors = Path | Sequence[tuple[object, object]]
#: writes new weights into one part of a model; on the launch thread, between steps
Change = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and limits of a loaded model."""

    architecture: str
    num_layers: int
    #: the keys and values of a position, in the order of the layers that write them
    kv_layers: tuple[KVShape, ...]
    hidden_size: int
    #: width of the logits
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    num_parameters: int
    #: name of the backend of a mixture of experts, and why it; None in a model without experts
    expert_kernels: str | None = None
    expert_reason: str = ""
    #: positions of a block of a block diffusion model, whose logits are those of the position itself, not of
    #: the next one; None for an autoregressive model
    block_size: int | None = None
    #: the token of unknown positions of a block; None for an autoregressive model
    mask_token_id: int | None = None
    #: tokens that delete a position of a block and that split it in two; None: the model has none
    edit_token_ids: tuple[int, int] | None = None
    #: blocks are canvases (DiffusionGemma): they begin right behind the prompt, unknown positions hold random
    #: tokens, and the keys and values of final tokens are those of a causal pass, see
    #: :class:`~aioinfer.model.canvas.Canvas`
    canvas: bool = False
    #: name of the backend of the layers between attention, and why it; empty if they are transformers' own
    layer_kernels: str = ""
    layer_reason: str = ""
    #: where all layers are native, the class of their float arithmetic:
    #: see :func:`aioinfer.native.bindings.arithmetic`
    arithmetic: str = ""
    #: reason why transformers computes the model; empty if this package's own code does
    fallback_reason: str = ""
    #: see :func:`aioinfer.model.rope.factors`
    rotary_factors: str = ""
    #: which part of the checkpoint the model is; empty if it is all of it
    part: str = ""
    #: the forward gives hidden states
    hidden_states: bool = True
    #: number of classes of a classifier; 0: it is none
    num_labels: int = 0
    #: the checkpoint has a head that gives logits of tokens
    generates: bool = True
    #: every position sees all of its prompt, which is one row and never cut
    whole_prompts: bool = False
    #: of a model with an image encoder; None: it has none
    images: ImageSupport | None = None
    #: the recurrent state of a sequence, see :mod:`aioinfer.model.state`; empty if the model has none
    states: tuple[StateShape, ...] = ()
    #: of a model whose layers attend to latents, the sizes that native kernels compute in whole vectors;
    #: empty for other models
    latent: tuple[int, ...] = ()

    @property
    def head_dims(self) -> frozenset[int]:
        """Sizes of the heads of all layers."""
        return frozenset(kv.head_dim for kv in self.kv_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one cell of recurrent state."""
        return sum(state.bytes for state in self.states)

    @property
    def verifies(self) -> bool:
        """Drafts can be verified: a recurrent state can do without what they bring to it."""
        return all(state.inputs for state in self.states)

    @property
    def stash_bytes(self) -> int:
        """Bytes of what a draft brings to the recurrent state of a sequence."""
        return sum(state.inputs for state in self.states) * self.dtype.itemsize

    @property
    def unit(self) -> int:
        """Positions that are generated at a time: 1, or those of a block."""
        return self.block_size or 1

    @property
    def grain(self) -> int:
        """Sequences begin to generate at multiples of so many positions."""
        return 1 if self.canvas else self.unit


class CausalLM(Protocol):
    """A model that computes packed rows."""

    spec: ModelSpec
    #: the head of a classifier: float32 hidden states [S, hidden] to logits [S, classes]; None: it is none
    classifier: Callable[[torch.Tensor], torch.Tensor] | None
    #: whether a CUDA graph can capture the forward: it reads nothing on the host that changes between steps
    capturable: bool
    #: whether a token's logits have the same bits in any batch, under any chunking of its sequence and with
    #: any part of its KV taken from the prefix cache
    invariant: bool
    #: how it is given other weights; None: they cannot be replaced
    updates: Recipe | None
    #: computes the features of images; None: there is none
    encoder: Encoder | None

    @property
    def adapters(self) -> AdapterSlots | None:
        """The adapters that rows of a batch can name; None: this model computes none."""

    @property
    def adapter_reason(self) -> str:
        """Reason why it computes none; empty if it does."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that each part of the forward has taken over all forwards; empty if not measured."""

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Compute a step and write its KV.

        Returns the logits of ``batch.logits_rows``, [S, vocab_size] in the model's dtype. Where
        ``batch.hidden_rows`` is set, ``batch.hidden`` has their hidden states then.
        """


class Recipe(Protocol):
    """Replaces the weights of a model."""

    def prepare(
        self, model: CausalLM, given: NewTensors, go_on: Callable[[], None], copies: Share
    ) -> Iterable[Change]:
        """Read and check weights without changing the model; on any thread but the launch thread. ``go_on``
        is called again and again, and may raise; ``copies`` gets the memory that they take until they are
        written. Raises ConfigError, OutOfMemory."""


def eos_token_ids(generation_config: Mapping[str, Any], config: Any) -> frozenset[int]:
    """The end tokens of a checkpoint: those of its generation_config.json, else those of ``config``.

    Ids that the vocabulary does not have are left out, as -1, which some configs use for none.

    Raises ConfigError if the ids are not integers.
    """
    eos, source = getattr(config, "eos_token_id", None), "config.json"
    stated = generation_config.get("eos_token_id")
    if stated is not None:
        eos, source = stated, "generation_config.json"
    ids = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"model: eos_token_id in {source} must be token ids, got {shown(eos)}")
    known = frozenset(token for token in ids if 0 <= token < config.vocab_size)
    if any(token >= config.vocab_size for token in ids):
        _log.warning(
            "eos_token_id in %s is %s; the model has %d tokens", source, shown(eos), config.vocab_size
        )
    return known
