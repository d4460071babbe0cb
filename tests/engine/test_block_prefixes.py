"""The prefix cache of a diffusion engine: whole blocks whose tokens are final, computed once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.block_course import SIZE, Course, ask
from tests.engine.worlds import VOCAB

SETTINGS: list[dict[str, Any]] = [
    {"overlap_steps": 0},
    {"overlap_steps": 2},
    {"fused_commit": False},
    {"mixed": False},
    {"chunk_size": 2 * SIZE},
    {"page_size": 2 * SIZE},
    {"max_rounds": 4, "overlap_steps": 0},
    {"diffusion_mode": "sync"},
]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=count)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_prompts_that_arrive_together_compute_their_common_beginning_once(settings: dict[str, Any]) -> None:
    common = tokens(4 * SIZE)
    asked = [ask([*common, *tokens(count, count)], max_tokens=6) for count in (3, 3, 5)]
    course = Course(asked, share_prefix_tokens=2 * SIZE, **settings)
    course.run()
    course.verify()
    assert [request.output.cached_tokens for request in course.requests] == [0, 4 * SIZE, 4 * SIZE]


@pytest.mark.parametrize("window", [0, 1, 2])
def test_the_last_chunk_of_a_common_beginning_is_waited_for_while_it_is_in_flight(window: int) -> None:
    common = tokens(6 * SIZE)
    asked = [ask([*common, *tokens(3, number)], max_tokens=6) for number in range(3)]
    course = Course(asked, share_prefix_tokens=2 * SIZE, chunk_size=4 * SIZE, overlap_steps=window)
    course.run()
    course.verify()
    assert [request.output.cached_tokens for request in course.requests] == [0, 6 * SIZE, 6 * SIZE]


@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_next_turn_of_a_chat_finds_what_was_generated(settings: dict[str, Any], algorithm: str) -> None:
    first = ask(tokens(2 * SIZE + 1), algorithm, max_tokens=4 * SIZE)
    course = Course([first], **settings)
    course.run()
    answer = course.requests[0].output_ids
    assert len(answer) == 4 * SIZE
    turn = ask([*first[0], *answer, *tokens(SIZE + 1, 2)], algorithm, max_tokens=SIZE + 1)
    course.arrive(turn)
    course.run()
    course.verify()
    # The output ends in the block behind these, so that nobody ever knew the whole of it.
    page = course.config.page_size
    known = (len(first[0]) + len(answer)) // SIZE * SIZE
    least = known - SIZE  # the last block is not committed if nothing comes behind it
    cached = course.requests[1].output.cached_tokens
    assert least // page * page <= cached <= known // page * page
    cold = Course([turn], prefix_cache=False, **settings)
    cold.run()
    assert cold.requests[0].output_ids == course.requests[1].output_ids
    assert cold.requests[0].output.logprobs == course.requests[1].output.logprobs
    assert cold.requests[0].cursor.step_map == course.requests[1].cursor.step_map


def test_pages_are_exchanged_for_those_of_another_while_rounds_are_in_flight() -> None:
    """Two compute the same without waiting for each other; who comes second takes the other's pages."""
    prompt = tokens(4 * SIZE + 1)
    for window in (0, 1, 2):
        asked = [ask(prompt, max_tokens=3 * SIZE), ask(prompt, max_tokens=3 * SIZE + 2)]
        course = Course(asked, share_prefix_tokens=0, overlap_steps=window)
        course.run()
        course.verify()
        assert [request.output.cached_tokens for request in course.requests] == [0, 0]
        pages = course.scheduler.memory.pages
        held = -(-(len(prompt) + 3 * SIZE + 2) // SIZE)
        assert pages.cached <= held, "what is the same is kept once"
