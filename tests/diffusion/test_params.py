"""What may be asked of an algorithm, and how one is found."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from aioinfer.diffusion.registry import algorithm_class, algorithm_names, usable_algorithms
from aioinfer.errors import InvalidRequest
from aioinfer.params import DiffusionParams, SamplingParams

WRONG: list[tuple[str, Any]] = [
    *[("algorithm", value) for value in ("", "LowConfidence", "registry", None, 3)],
    *[
        (name, value)
        for name in ("threshold", "edit_threshold")
        for value in (-0.1, 1.1, float("nan"), "1", True)
    ],
    *[("steps", value) for value in (0, -1, 2.0, True, 1 << 20)],
    *[("max_post_edits", value) for value in (-1, 1.5, 1 << 20)],
    *[("penalty", value) for value in (-1.0, float("inf"))],
    *[("factor", value) for value in (0, -1.0, float("nan"))],
    *[("entropy_bound", value) for value in (-0.1, float("inf"))],
    *[(name, value) for name in ("t_min", "t_max") for value in (0.0, -1.0, float("nan"))],
    *[("stability_threshold", value) for value in (-1, 1.0)],
    *[("confidence_threshold", value) for value in (-0.1, float("nan"))],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DiffusionParams(**{name: value})
    assert caught.value.field == name


def test_algorithms_are_found_by_their_files() -> None:
    names = ("entropy_bound", "factor", "joint_threshold", "joint_threshold_indel", "low_confidence")
    assert algorithm_names() == (*names, "renoise", "static_steps")
    for name in algorithm_names():
        found = algorithm_class(name)
        assert found.name == name
        assert found.monotone == ("joint" not in name and not found.canvas)
        assert (name in usable_algorithms(None)) == (not found.moves and not found.canvas)
        assert (name in usable_algorithms((1, 2))) == (not found.canvas)
        assert (name in usable_algorithms(None, canvas=True)) == found.canvas
        DiffusionParams(algorithm=name, **found.parameters | {"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="os"):
        algorithm_class("os")


def test_a_parameter_that_would_be_ignored_is_refused() -> None:
    for name in algorithm_names():
        found = algorithm_class(name)
        found.check(DiffusionParams(algorithm=name, steps=4))
        for other in {"threshold", "penalty", "factor", "entropy_bound", "max_post_edits"} - set(
            found.parameters
        ):
            with pytest.raises(InvalidRequest, match=name):
                found.check(DiffusionParams(algorithm=name, **{other: 1}))


def test_temperatures_that_would_rise_are_refused() -> None:
    renoise = algorithm_class("renoise")
    renoise.check(DiffusionParams(algorithm="renoise", t_min=0.5, t_max=0.5))
    for given in ({"t_min": 0.9}, {"t_max": 0.3}, {"t_min": 0.7, "t_max": 0.6}):
        with pytest.raises(InvalidRequest, match="rise") as caught:
            renoise.check(DiffusionParams(algorithm="renoise", **given))
        assert caught.value.field in given


def test_rows_have_their_own_parameters_and_else_the_algorithm_s() -> None:
    joint = algorithm_class("joint_threshold")
    params = [DiffusionParams(algorithm="joint_threshold", threshold=0.7, steps=5), DiffusionParams()]
    state = joint.init_state(params, [SamplingParams(top_k=-1), SamplingParams(top_p=0.5)], [3, -4])
    assert state["threshold"].tolist() == pytest.approx([0.7, 0.5])
    assert state["steps"].tolist() == [5, 0]
    assert state["top_k"].tolist() == [0, 0]
    assert state["seed"].tolist() == [3, -4]
    assert state["max_post_edits"].dtype == torch.int64


def test_asking_for_an_algorithm_imports_no_torch() -> None:
    code = "import sys, aioinfer.params as p; p.DiffusionParams(steps=1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
