"""Decoding: the two ways of generating, sampling tokens and denoising blocks, with one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.execution.decoding.base import Kind

if TYPE_CHECKING:
    from aioinfer.model.spec import ModelSpec

__all__ = ["kind"]


def kind(spec: ModelSpec) -> Kind:
    """Kind of a model's decoding. Called once, when the model is loaded."""
    if spec.block_size is None:
        from aioinfer.execution.decoding.tokens import TokenKind

        return TokenKind(spec)
    from aioinfer.execution.decoding.blocks import BlockKind

    return BlockKind(spec)
