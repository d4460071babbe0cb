"""Costs are found again in the steps that they made, and files of them are read as they were written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aioinfer.errors import ConfigError
from aioinfer.scheduling.costs import Costs, Fit, Sizes, StepCosts
from aioinfer.scheduling.step_time import StepTime
from aioinfer.twin.calibration import compare
from aioinfer.twin.fitting import fit_host, fit_steps, nnls, quantiles, seconds_of
from aioinfer.twin.recording import RecordedStep
from aioinfer.twin.roofline import HARDWARE, roofline
from tests.twin.worlds import COSTS

TRUE = StepCosts(0.004, 3e-5, 1.5e-7, 2e-8, (1e-5, 2e-4), (0, 32), 8e-4)


def sizes_of(count: int, seed: int = 0) -> list[Sizes]:
    dice, found = np.random.default_rng(seed), []
    for _ in range(count):
        rows = int(dice.integers(0, 60))
        tokens = int(dice.integers(1, 500)) if dice.random() < 0.5 or not rows else 0
        pairs = tokens * (dice.integers(0, 1000) + tokens / 2)
        found.append(Sizes(rows, rows * float(dice.integers(10, 2000)), tokens, float(pairs)))
    return found


def noisy(sizes: list[Sizes], noise: float, seed: int = 1) -> np.ndarray:
    dice = np.random.default_rng(seed)
    factors = dice.lognormal(-noise * noise / 2, noise, len(sizes))
    return np.array([TRUE.seconds(each) for each in sizes]) * factors


def recorded(sizes: list[Sizes], seconds: np.ndarray) -> list[RecordedStep]:
    """One step right behind the other; the host plans in 1 ms and 0.01 ms a row, and notices in 0.2 ms."""
    found, now = [], 10.0
    for number, (size, took) in enumerate(zip(sizes, seconds.tolist(), strict=True)):
        rows = tuple(range(int(size.rows)))
        chunk = ((999, int(size.tokens)),) if size.tokens else ()
        host = 1e-3 + 1e-5 * (len(rows) + len(chunk))
        end = now + took
        found.append(
            RecordedStep(number, size, rows, chunk, now - host, now, now, end, end + 2e-4, end + 5e-4)
        )
        now = end
    return found


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_steps_are_predicted_by_what_was_fitted_to_others(noise: float) -> None:
    sizes = sizes_of(1500)
    costs, (quantiles_of_noise, _), fit = fit_steps(sizes, noisy(sizes, noise))
    others = sizes_of(300, seed=5)
    predicted = np.array([costs.seconds(each) for each in others])
    assert np.abs(predicted / [TRUE.seconds(each) for each in others] - 1).max() < (
        0.01 if not noise else 0.1
    )
    assert np.mean(quantiles_of_noise) == pytest.approx(1.0, abs=0.02)
    assert np.std(quantiles_of_noise) == pytest.approx(noise, abs=0.03)
    assert fit.r2 > (0.999 if not noise else 0.8)
    assert fit.steps == 1500
    assert fit.ranges["rows"] == (0.0, 59.0)


def test_no_cost_is_negative_where_steps_are_all_alike() -> None:
    costs, *_ = fit_steps([Sizes(4, 400.0)] * 50, np.full(50, 0.01))
    assert costs.seconds(Sizes(4, 400.0)) == pytest.approx(0.01)
    assert min(costs.base, costs.row, costs.context, costs.attention, costs.prefill, *costs.token) >= 0


def test_a_disturbed_step_does_not_count() -> None:
    sizes = sizes_of(400)
    seconds = noisy(sizes, 0.0)
    seconds[7] *= 50
    costs, *_ = fit_steps(sizes, seconds)
    assert costs.seconds(sizes[0]) == pytest.approx(TRUE.seconds(sizes[0]), rel=0.03)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 steps or more, got 3"):
        fit_steps([Sizes(1)] * 3, np.ones(3))


def test_non_negative_least_squares_are_those_of_trying_all_subsets() -> None:
    dice = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = dice.normal(size=(12, 4)), dice.normal(size=12)
        best = np.linalg.norm(target)
        for subset in range(1, 16):
            columns = [at for at in range(4) if subset >> at & 1]
            found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            if (found >= 0).all():
                best = min(best, np.linalg.norm(matrix[:, columns] @ found - target))
        solved = nnls(matrix, target)
        assert (solved >= 0).all()
        assert np.linalg.norm(matrix @ solved - target) == pytest.approx(best)


def test_the_host_is_measured_beside_the_device() -> None:
    sizes = sizes_of(200)
    steps = recorded(sizes, noisy(sizes, 0.0))
    assert seconds_of(steps)[1:] == pytest.approx(noisy(sizes, 0.0)[1:])
    host = fit_host(steps, TRUE)
    assert host.plan == pytest.approx((1e-3, 1e-5))
    assert host.read == pytest.approx((3e-4, 0.0), abs=1e-9)
    assert host.notice == pytest.approx([2e-4] * len(host.notice))


def test_a_device_that_was_idle_for_long_begins_later() -> None:
    sizes, late, steps = sizes_of(400), 0.0, []
    for number, step in enumerate(recorded(sizes, noisy(sizes, 0.1))):
        pause, begin = [(-1e-4, 0.0), (5e-3, 3e-4), (5e-3, 3e-4), (0.5, 9e-3)][number % 4]
        launched = step.launched + late + pause  # a step is launched before the end of the one in front of it
        late += max(0.0, pause) + begin
        steps.append(step._replace(launched=launched, begun=step.begun + late, ended=step.ended + late))
    host = fit_host(steps, TRUE)
    assert host.begin == pytest.approx(3e-4)
    assert host.cold == pytest.approx(9e-3 - 3e-4, rel=0.15)
    assert seconds_of(steps)[1:] == pytest.approx(noisy(sizes, 0.1)[1:])


def test_quantiles_have_the_mean_and_the_spread() -> None:
    values = np.random.default_rng(2).gamma(2.0, 3.0, 10_000)
    assert np.mean(quantiles(values)) == pytest.approx(values.mean(), rel=0.01)
    assert np.std(quantiles(values)) == pytest.approx(values.std(), rel=0.05)


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.05, True), (1.2, False), (0.8, False)])
def test_costs_that_are_a_fifth_wrong_are_found(factor: float, agrees: bool) -> None:
    sizes = sizes_of(1500)
    steps = recorded(sizes, factor * noisy(sizes, 0.2))
    found = compare(Costs(step=TRUE), steps)
    assert found.agrees is agrees
    assert found.ratio == pytest.approx(factor, rel=0.05)
    assert found.steps == 1500


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_costs_of_one_kind_of_steps_that_are_a_fifth_wrong_are_found(part: str) -> None:
    sizes = sizes_of(1500)
    factors = [1.2 if (part == "prefill") == (each.tokens > 0) else 1.0 for each in sizes]
    found = compare(Costs(step=TRUE), recorded(sizes, factors * noisy(sizes, 0.2)))
    assert getattr(found, part) == pytest.approx(1.2, rel=0.05)
    assert not found.agrees


@pytest.mark.parametrize("slow", [lambda size, _: size.rows > 45, lambda _, number: number % 10 < 3])
def test_costs_that_are_wrong_of_some_steps_are_found(slow: Callable[[Sizes, int], bool]) -> None:
    sizes = sizes_of(1000)
    factors = [2.0 if slow(each, number) else 1.0 for number, each in enumerate(sizes)]
    assert not compare(Costs(step=TRUE), recorded(sizes, factors * noisy(sizes, 0.2))).agrees


def test_a_neighbour_that_is_busy_for_a_while_makes_no_costs_wrong() -> None:
    sizes = sizes_of(600)
    seconds = noisy(sizes, 0.2)
    seconds[200:320] *= 1.8
    assert compare(Costs(step=TRUE), recorded(sizes, seconds)).agrees
    assert seconds.sum() > 1.15 * noisy(sizes, 0.2).sum()


# -- files ---------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    fit = Fit(100, 0.99, 0.03, 0.1, {"rows": (0.0, 8.0)})
    costs = msgspec.structs.replace(COSTS, fit=fit, fingerprint={"model": "m", "processor": "p"})
    costs.write(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    assert costs.description == "m, p (100 steps, median error 3.0%)"
    assert costs.outside(Sizes(17, 1e9)) == "rows"
    assert not costs.outside(Sizes(16))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("{", "is no file of aioinfer calibrate"),
        ('{"step": {"base": 1}}', "is no file of aioinfer calibrate"),
        (STEP := '{"step": {"base": -1, "row": 0, "context": 0, "attention": 0, "token": [0]}}', "positive"),
        (STEP.replace("-1", "1").replace("[0]", "[0, 1]"), "knees rise"),
        (STEP.replace("-1", "1").replace("[0]", "[1e999]"), "is no file|positive"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        Costs.read(path)
    assert "costs.json" in str(caught.value)


# -- in an engine --------------------------------------------------------------------------------------


def test_calibrated_costs_are_known_at_once_and_refined_within_bounds() -> None:
    size = Sizes(8, 4000.0)
    times, expected = StepTime(0.2, Costs(step=TRUE)), TRUE.seconds(size)
    assert times.known
    assert times.seconds(size) == pytest.approx(expected)
    for _ in range(500):
        times.note(size, 1.3 * expected)
    assert times.seconds(size) == pytest.approx(1.3 * expected, rel=0.02)
    for _ in range(500):
        times.note(size, 100 * expected)
    assert times.seconds(size) <= 2 * expected * 1.001


def test_costs_are_not_refined_where_that_is_off() -> None:
    size = Sizes(8, 4000.0, 100.0, 5000.0)
    times = StepTime(0.2, Costs(step=TRUE), refines=False)
    for _ in range(100):
        times.note(size, 1.0)
    assert times.seconds(size) == pytest.approx(TRUE.seconds(size))


def test_drafts_are_judged_by_calibrated_costs_until_steps_have_run() -> None:
    times = StepTime(0.0, Costs(step=TRUE))
    assert times.decodes
    assert times.decodes.of(8) == pytest.approx(TRUE.seconds(Sizes(8)))
    assert times.verifies.of(32) == pytest.approx(TRUE.seconds(Sizes(32)))


def test_a_chunk_that_fits_takes_the_time_that_there_is_across_knees() -> None:
    times = StepTime(0.2, Costs(step=TRUE))
    for start in (0, 5000):
        for before in (0, 20, 40):
            length = times.fitting(start, 0.02, before)
            assert times.prefill(start, length, before) <= 0.02 < times.prefill(start, length + 1, before)


# -- elsewhere -----------------------------------------------------------------------------------------


class Config:
    """As transformers has it, of a model of 8 billion parameters."""

    num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads = 36, 4096, 32, 8
    intermediate_size, vocab_size, head_dim, max_position_embeddings = 12288, 151936, 128, 40960

    def get_text_config(self) -> Config:
        return self


def test_a_roofline_reads_the_weights_of_each_step_and_says_that_it_is_none_of_a_measurement() -> None:
    costs = roofline("eight", Config(), "h200")
    assert costs.extrapolated
    assert "not measured" in costs.description
    one, many = costs.step.seconds(Sizes(1, 1000.0)), costs.step.seconds(Sizes(0, 0, 4096, 4096 * 2048))
    weights = 2 * 8.2e9 / HARDWARE["h200"].bandwidth
    assert weights < one < 2 * weights
    assert many > 2 * 8.2e9 * 4096 / HARDWARE["h200"].flops
    assert roofline("eight", Config(), "b200").step.seconds(Sizes(1)) < one
    assert costs.engine["num_pages"] > roofline("eight", Config(), "a100-80gb").engine["num_pages"]


def test_hardware_that_is_unknown_or_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware must be one of a100-80gb, .*, got 'abacus'"):
        roofline("eight", Config(), "abacus")
    large = type("Large", (Config,), {"num_hidden_layers": 500})()
    with pytest.raises(ConfigError, match="one l40s is too small"):
        roofline("large", large, "l40s")
