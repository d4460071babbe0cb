"""Top-n-sigma (Tang et al., arXiv 2411.07641)."""

from __future__ import annotations

import torch

__all__ = ["TopNSigma"]


class TopNSigma:
    """Keep tokens whose logit is within n standard deviations of the largest. Independent of temperature."""

    def keep(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        finite = logits.isfinite()
        count = finite.sum(dim=1, keepdim=True)
        mean = logits.where(finite, 0).sum(dim=1, keepdim=True) / count
        variance = (logits - mean).square().where(finite, 0).sum(dim=1, keepdim=True) / count
        return logits >= logits.amax(dim=1, keepdim=True) - values * variance.sqrt()
