"""Gemma 4: a ViT over images of any shape, with rotary positions in two dimensions.

Queries, keys and values are normed by head, and norms stand on both sides of each part. The features of
squares of patches are averaged. In some checkpoints the inputs and outputs of all linear layers are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aioinfer.images.formats.gemma4 import MOST_POSITIONS
from aioinfer.model.gates import CONFIG_GATES, Gate, gated
from aioinfer.model.linear import Linear, TorchLinear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.source import TowerSource, VisionFamily
from aioinfer.model.vision.tower import (
    Block,
    Pixels,
    Product,
    Rotation,
    Tower,
    TowerState,
    averaged_patches,
)
from aioinfer.model.weights import StoredMatrix

__all__ = ["Gemma4"]


class Gemma4(VisionFamily):
    """Encoders of Gemma 4, but for those without layers (``Gemma4Unified``)."""

    prefixes = ("vision_tower.", "embed_vision.")

    def unsupported_reason(self, config: Any) -> str | None:
        vision = config.vision_config
        if vision is None:
            return "no encoder of images"
        if vision.hidden_activation not in CONFIG_GATES:
            return f"the activation {vision.hidden_activation} in its encoder"
        if vision.num_key_value_heads != vision.num_attention_heads or vision.head_dim % 4:
            return f"heads of size {vision.head_dim}, or queries that share keys, in its encoder"
        if vision.rope_parameters.get("rope_type") != "axial":
            return "its kind of rotary positions in its encoder"
        return None

    def two_way(self, config: Any) -> bool:
        return bool(config.text_config.use_bidirectional_attention == "vision")

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        heads = vision.num_attention_heads * vision.head_dim
        return [vision.hidden_size, vision.intermediate_size, heads]

    def encoder(self, source: TowerSource) -> Encoder:
        return _Gemma4Tower(source, two_way=self.two_way(source.config))


@dataclass(frozen=True, slots=True)
class _Clipped:
    """A linear layer whose inputs and outputs are clipped."""

    linear: Linear
    #: the least and the largest input, and the same of outputs
    inputs: tuple[float, float]
    outputs: tuple[float, float]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values.clamp(*self.inputs)).clamp(*self.outputs)


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """Linear layers of the same inputs."""

    parts: Sequence[Product]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(values) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True)
class _ClippedMLP:
    gate: Product
    up: Product
    down: Product
    function: Gate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.function, self.gate(hidden), self.up(hidden)))


class _Gemma4Tower(Tower):
    def __init__(self, source: TowerSource, *, two_way: bool) -> None:
        config, vision, weights = source.config, source.config.vision_config, source.weights
        width, text, name = vision.hidden_size, config.text_config, "vision_tower.patch_embedder"
        self._factor, self._size = vision.pooling_kernel_size, vision.head_dim
        self._theta: float = vision.rope_parameters["rope_theta"]
        inputs = 3 * vision.patch_size**2
        self._patches = TorchLinear(weights.take(f"{name}.input_proj.weight", (width, inputs)), None)
        positions = vision.position_embedding_size
        self._columns, self._rows = weights.take(f"{name}.position_embedding_table", (2, positions, width))
        blocks = [_block(source, index) for index in range(vision.num_hidden_layers)]
        self._shift = self._spread = None
        if vision.standardize:
            self._shift, self._spread = (
                weights.take(f"vision_tower.std_{each}", (width,), dtype=torch.float32)
                for each in ("bias", "scale")
            )
        self._norm = Norm(self._rows.new_ones(width, dtype=torch.float32), vision.rms_norm_eps)
        self._projection: Linear = source.linear(
            ["embed_vision.embedding_projection"], [text.hidden_size], width, bias=False
        )
        longest = getattr(config, "vision_soft_tokens_per_image", MOST_POSITIONS)
        # The inputs by layer of an image's positions are those of the padding.
        super().__init__(blocks, source.support(longest, filler_id=text.pad_token_id, two_way=two_way))

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "patches" float32 [rows * columns, size * size * channels] of values from 0 to 1, and
        "grid": rows and columns."""
        rows, columns = (int(count) for count in pixels["grid"])
        table = self._rows
        if max(rows, columns) > len(table):
            raise ValueError(f"images of {columns} x {rows} patches, at most {len(table)} a side")
        values = torch.from_numpy(pixels["patches"].copy())
        hidden = self._patches((2 * (values - 0.5)).to(table.device, table.dtype))
        added = self._columns[None, :columns] + table[:rows, None]
        return TowerState(hidden + added.flatten(0, 1), (rows, columns), self._rotation(rows, columns))

    def end(self, state: TowerState) -> torch.Tensor:
        hidden = averaged_patches(state.residual(), state.grid, self._factor).float()
        hidden = hidden * hidden.shape[-1] ** 0.5
        if self._shift is not None and self._spread is not None:
            hidden = (hidden - self._shift) * self._spread
        return self._projection(normed(hidden.to(state.hidden.dtype), self._norm))[None]

    def _rotation(self, rows: int, columns: int) -> Rotation:
        """A half of each head is rotated by the column, the other one by the row."""
        half, device = self._size // 2, self._rows.device
        rates = 1.0 / self._theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=device) / half)
        row, column = (torch.arange(count, device=device) for count in (rows, columns))
        places = torch.stack((column.repeat(rows), row.repeat_interleave(columns)), dim=1)
        angles = places[:, :, None].float() * rates
        return angles.cos().to(self._rows.dtype), angles.sin().to(self._rows.dtype)


def _block(source: TowerSource, index: int) -> Block:
    vision, name = source.config.vision_config, f"vision_tower.encoder.layers.{index}"
    width, heads, size = vision.hidden_size, vision.num_attention_heads, vision.head_dim
    eps, inner = vision.rms_norm_eps, heads * size
    attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
        source.rms_norm(f"{name}.{norm}_layernorm", width, eps, "exact")
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    query, key, value, out = (f"{name}.self_attn.{part}_proj" for part in "qkvo")
    query_norm, key_norm = (
        source.rms_norm(f"{name}.self_attn.{part}_norm", size, eps, "exact") for part in "qk"
    )
    return Block(
        source.kernels.operations,
        attention_norm=attention_norm,
        attention=source.attention(
            qkv=_linear(source, [query, key, value], inner, width),
            out=_linear(source, [out], width, inner),
            heads=heads,
            scale=1.0,
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=Norm(torch.ones_like(query_norm.weight), eps),
        ),
        mlp_norm=mlp_norm,
        mlp=_mlp(source, f"{name}.mlp"),
        attention_post_norm=attention_post_norm,
        mlp_post_norm=mlp_post_norm,
    )


def _mlp(source: TowerSource, name: str) -> FeedForward:
    vision, weights = source.config.vision_config, source.weights
    width, middle = vision.hidden_size, vision.intermediate_size
    function = CONFIG_GATES[vision.hidden_activation]
    gate, up, down = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
    if vision.use_clipped_linears:
        gates, ups = (_linear(source, [each], middle, width) for each in (gate, up))
        return _ClippedMLP(gates, ups, _linear(source, [down], width, middle), function)
    both = StoredMatrix(weights, [f"{gate}.linear", f"{up}.linear"], [middle] * 2, width, bias=False)
    return source.kernels.gated_mlp(
        both, StoredMatrix(weights, [f"{down}.linear"], [width], middle, bias=False), function
    )


def _linear(source: TowerSource, names: Sequence[str], outputs: int, inputs: int) -> Product:
    """Linear layers of ``outputs`` each as one."""
    if not source.config.vision_config.use_clipped_linears:
        return source.linear([f"{name}.linear" for name in names], [outputs] * len(names), inputs, bias=False)

    def bounds(name: str, of: str) -> tuple[float, float]:
        least, most = (source.weights.take(f"{name}.{of}_{end}", ()).item() for end in ("min", "max"))
        return least, most

    parts = [
        _Clipped(
            source.linear([f"{name}.linear"], [outputs], inputs, bias=False),
            bounds(name, "input"),
            bounds(name, "output"),
        )
        for name in names
    ]
    return parts[0] if len(parts) == 1 else _SideBySide(parts)
