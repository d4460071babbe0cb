"""Fields of other families that a config states all the same: transformers' code does not read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import assert_greedy, make_checkpoint


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("lfm2", {"rms_norm_eps": 0.5}),
        ("lfm2-moe", {"rms_norm_eps": 0.5}),
        ("llama-gqa-tied", {"no_rope_layers": [0, 0, 1], "norm_eps": 0.5, "layer_norm_epsilon": 0.5}),
        ("gemma", {"final_logit_softcapping": 1.0, "query_pre_attn_scalar": 3}),
        ("mixtral", {"moe_intermediate_size": 16, "norm_eps": 0.5}),
        ("llama-gqa-tied", {"moe_intermediate_size": [1, 2], "num_experts_per_tok": []}),
        ("qwen3", {"num_experts_per_tok": 0, "moe_intermediate_size": 0, "no_rope_layers": [0, 0, 0]}),
    ],
)
def test_fields_of_another_family_are_not_read(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    oracle = make_checkpoint(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    assert_greedy(tmp_path, [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2]], 6, oracle)
