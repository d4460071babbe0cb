"""When images are encoded, and which chunks wait for them."""

from __future__ import annotations

import random
from collections import abc
from typing import Any

import pytest

from aioinfer.cache.namespace import Namespace
from aioinfer.images.prompt import ImageUnit, PromptImages, shown, words
from aioinfer.images.support import ImageSupport
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.features import FeatureCache
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import Outcome, Step
from tests.scheduling.desk import Desk
from tests.toys.features import ToyFeatures


def prompt(*parts: int | str, patches: int = 16, length: int = 8) -> tuple[list[int], PromptImages]:
    """A prompt of so many tokens of text, and images by name, of ``length`` positions each."""
    ids: list[int] = []
    units = []
    for part in parts:
        if isinstance(part, int):
            ids += range(100, 100 + part)
            continue
        units.append(ImageUnit(len(ids), length, part.encode().ljust(16), patches, {}))
        ids += words(part.encode(), length)
    return ids, PromptImages((), tuple(units))


class Reader:
    """A desk whose steps go to toy features."""

    def __init__(
        self, *, two_way: bool = False, capacity: int = 64, patches: int = 16, **limits: Any
    ) -> None:
        self.features = FeatureCache(capacity, patches, two_way=two_way)
        self.desk = Desk(features=self.features, **limits)
        self.toy = ToyFeatures(ImageSupport(token_id=1, two_way=two_way))

    def submit(self, *parts: int | str, patches: int = 16, max_tokens: int = 2, length: int = 8) -> Sequence:
        ids, images = prompt(*parts, patches=patches, length=length)
        return self.desk.submit(ids, max_tokens, images)

    def launch(self) -> Step | None:
        step = self.desk.scheduler.plan()
        audit(self.desk.scheduler)
        if step is not None:
            if step.encoding is not None:
                assert not step.num_rows
                self.toy.encode(step.encoding)
            for row in step.rows:
                self.toy.check(row)
        return step

    def launched(self) -> Step:
        step = self.launch()
        assert step is not None
        return step

    def steps(self, most: int = 200) -> list[Step]:
        """Run to the end."""
        found = []
        while self.desk.scheduler.queues.has_work:
            step = self.launch()
            assert step is not None, "a request waits, and nothing is planned"
            found.append(step)
            self.desk.bring(step)
            assert len(found) < most
        return found


def chunks(steps: abc.Iterable[Step]) -> list[str | tuple[int, int]]:
    """What each step was: "encode", or the positions of its first chunk."""
    return [
        "encode" if step.encoding else (step.prefilling[0].start, step.prefilling[0].kv_length)
        for step in steps
        if step.encoding or step.prefilling
    ]


def test_a_chunk_ends_in_front_of_an_image_that_is_then_encoded() -> None:
    reader = Reader()
    reader.submit(5, "cat", 3)
    assert chunks(reader.steps()) == [(0, 5), "encode", (5, 16)]


def test_an_image_at_the_beginning_is_encoded_first() -> None:
    reader = Reader()
    reader.submit("cat", 3)
    assert chunks(reader.steps()) == ["encode", (0, 11)]


def test_a_causal_image_is_cut_by_chunks_and_encoded_once() -> None:
    reader = Reader(chunk_size=4)
    reader.submit(2, "cat", 2)
    found = chunks(reader.steps())
    assert found.count("encode") == 1
    assert (4, 8) in found
    assert list(reader.toy.encoded.values()) == [1]


@pytest.mark.parametrize("chunk_size", [3, 4, 7, 64])
def test_an_image_that_attends_both_ways_is_never_cut(chunk_size: int) -> None:
    reader = Reader(two_way=True, chunk_size=chunk_size)
    reader.submit(2, "cat", "dog", 2)
    ends = {each[1] for each in chunks(reader.steps()) if isinstance(each, tuple)}
    assert not ends & {*range(3, 10), *range(11, 18)}


def test_an_image_that_is_cached_is_not_encoded() -> None:
    reader = Reader()
    reader.submit(4, "cat", 4)
    reader.steps()
    reader.submit(4, "cat", 8)
    steps = reader.steps()
    assert "encode" not in chunks(steps)
    assert reader.desk.memory.hit_tokens == 16


def test_another_image_of_the_same_size_is_not_found() -> None:
    reader = Reader()
    reader.submit(4, "cat", 4)
    reader.steps()
    reader.submit(4, "dog", 4)
    assert "encode" in chunks(reader.steps())
    assert reader.desk.memory.hit_tokens == 4, "the text in front is"


def test_without_its_words_another_image_would_be_found() -> None:
    """What the words are for."""
    reader = Reader()
    for name in ("cat", "dog"):
        ids, images = prompt(4, name, 4)
        reader.desk.submit([min(max(token, -1), token) if token > 0 else -1 for token in ids], 2, images)
        reader.steps()
    assert reader.desk.memory.hit_tokens > 4


def test_features_are_shared_by_prompts_that_have_the_same_image_elsewhere() -> None:
    reader = Reader()
    reader.submit(4, "cat", 1)
    reader.submit(9, "cat", 1)
    steps = reader.steps()
    assert sum(step.encoding is not None for step in steps) == 1
    assert list(reader.toy.encoded.values()) == [1]


def test_features_are_shared_with_the_same_salt_alone() -> None:
    reader = Reader()
    for salt in ("one", "other", "one"):
        ids, images = prompt(3, "cat")
        reader.desk.submit(ids, 2, images, namespace=Namespace(salt))
        reader.steps()
    assert reader.toy.encoded == {b"cat".ljust(16): 2}


def test_a_large_unit_is_computed_in_slices_between_which_others_decode() -> None:
    reader = Reader(patches=16)
    other = reader.submit(4, max_tokens=20)
    step = reader.launched()
    reader.desk.bring(step)
    reader.submit("cat", patches=100)
    steps = reader.steps()
    encodes = [at for at, step in enumerate(steps) if step.encoding]
    assert len(encodes) == 7
    assert all(steps[at + 1].generating.sequences == [other] for at in encodes[:-1])


def test_features_leave_when_others_need_the_room() -> None:
    reader = Reader(capacity=16, prefix_cache=False)
    for name in ("a", "b", "c", "a"):
        reader.submit(2, name)
        reader.steps()
    assert reader.toy.encoded[b"a".ljust(16)] == 2
    assert len(reader.toy.keys) <= 2


def test_a_unit_larger_than_the_cache_is_encoded_alone() -> None:
    reader = Reader(capacity=4)
    for name in ("a", "b"):
        reader.submit(2, name, 1)
    assert all(count == 1 for count in reader.toy.encoded.values())
    reader.steps()
    assert len(reader.toy.encoded) == 2


def test_a_retracted_request_finds_its_features() -> None:
    reader = Reader(chunk_size=4, prefix_cache=False)
    sequence = reader.submit(2, "cat", 2)
    for _ in range(3):
        step = reader.launched()
        reader.desk.bring(step)
    reader.desk.scheduler.retract(sequence)
    reader.steps()
    assert list(reader.toy.encoded.values()) == [1]


def test_a_step_of_the_encoder_that_fails_ends_the_request_it_was_for() -> None:
    reader = Reader()
    bad, good = reader.submit("cat", 3), reader.submit("dog", 3)
    step = reader.launched()
    assert step.encoding is not None
    error = RuntimeError("pixels")
    assert reader.desk.scheduler.fail(step, error) == [bad]
    reader.toy.spoil(step.encoding)
    assert bad.output.error is error
    reader.steps()
    assert good.output.finish_reason == "length"


def test_an_aborted_request_gives_its_features_back() -> None:
    reader = Reader(capacity=8)
    first = reader.submit("cat", 3)
    step = reader.launched()
    reader.desk.scheduler.finish(first, "abort")
    reader.desk.scheduler.resolve(step, Outcome([]))
    second = reader.submit("dog", 3)
    reader.steps()
    assert second.output.finish_reason == "length"


def test_a_parked_request_leaves_the_room_for_features_to_others() -> None:
    reader = Reader(capacity=8)
    parked, other = reader.submit("cat", 3), reader.submit("dog", 3)
    step = reader.launched()
    assert step.concerned == [parked]
    reader.desk.bring(step)
    reader.desk.scheduler.queues.park(parked)
    reader.steps()
    assert other.output.finish_reason == "length"
    reader.desk.scheduler.queues.unpark(parked)
    reader.steps()
    assert parked.output.finish_reason == "length"


def test_an_image_that_needs_much_room_is_not_passed_over_for_ever() -> None:
    reader = Reader(capacity=24, running=4, prefix_cache=False, chunk_size=2)
    first = reader.submit(1, "first", max_tokens=1)
    large = reader.submit(1, "large", max_tokens=1, length=20)
    for number in range(100):
        if len(reader.desk.scheduler.queues.unfinished()) < 4:
            reader.submit(1, str(number), max_tokens=1)
        reader.desk.bring(reader.launched())
        if large.finished:
            break
    assert first.finished
    assert large.finished, "small images go first, again and again"


def test_one_step_of_the_encoder_is_launched_behind_rows_for_whose_result_others_wait() -> None:
    """However far ahead steps are planned: the rows that follow would wait for all of them."""
    reader = Reader(patches=16)
    reader.submit("cat", patches=100)
    texts = [reader.submit(3), reader.submit(3)]
    reader.desk.scheduler.fail(reader.launched(), RuntimeError("one of the two"))
    reader.desk.bring(reader.launched())
    alone, encoding = reader.launched(), reader.launched()
    assert alone.sequences == texts[:1]
    assert encoding.encoding is not None
    assert reader.launch() is None
    reader.desk.bring(alone)
    reader.desk.bring(encoding)
    reader.steps()
    assert all(each.output.finish_reason == "length" for each in texts)


def test_what_is_known_of_lost_features_does_not_grow() -> None:
    reader = Reader()
    for number in range(50):
        reader.submit(str(number), 1)
        step = reader.launched()
        reader.desk.scheduler.fail(step, RuntimeError("pixels"))
        assert len(reader.features._lost) <= 1


def test_a_request_without_output_pays_for_an_image_that_is_not_cut() -> None:
    """Others of its kind then have no row in the step, and no row of fewer positions than none."""
    reader = Reader(two_way=True, chunk_size=4, prefix_cache=False)
    reader.submit(2, max_tokens=30)
    reader.desk.bring(reader.launched())
    reader.submit("cat", 6, max_tokens=0)
    reader.submit(9, max_tokens=0)
    reader.submit("dog", 6, max_tokens=0)
    for step in reader.steps():
        assert all(row.length > 0 for row in step.rows)


def test_features_are_not_read_again_that_a_request_failed_with() -> None:
    reader = Reader()
    first = reader.submit("cat", 3)
    reader.desk.bring(reader.launched())
    assert reader.desk.scheduler.fail(reader.launched(), RuntimeError("features")) == [first]
    reader.submit("cat", 3)
    assert chunks(reader.steps()) == ["encode", (0, 11)]
    assert list(reader.toy.encoded.values()) == [2]


def test_an_image_that_is_being_read_keeps_its_room() -> None:
    reader = Reader(capacity=8, chunk_size=3, prefix_cache=False)
    reader.submit("cat", 1)
    reader.steps()
    reader.submit("cat", 1)  # its features are there
    reader.submit("dog", 1)
    reader.steps()
    assert [*reader.toy.encoded.values()] == [1, 1]


def test_what_was_read_longest_ago_leaves_first() -> None:
    reader = Reader(capacity=16, prefix_cache=False)
    for name in ("a", "b", "a", "c", "a", "b"):
        reader.submit(2, name)
        reader.steps()
    assert [*reader.toy.encoded.values()] == [1, 2, 1]


def test_other_weights_encode_anew() -> None:
    reader = Reader(prefix_cache=False)
    reader.submit("cat", 3)
    reader.steps()
    reader.desk.scheduler.replace_weights(1)
    reader.submit("cat", 3)
    reader.steps()
    assert [*reader.toy.encoded.values()] == [2]


@pytest.mark.parametrize("short", [False, True])
def test_an_image_that_is_not_cut_waits_for_a_step_with_room(short: bool) -> None:
    """Behind a prompt that is under way, and while memory is short."""
    reader = Reader(two_way=True, running=5, max_step_tokens=13, chunk_size=5, prefix_cache=False)
    for _ in range(3):
        reader.submit(1, max_tokens=30)
    reader.desk.bring(reader.launched())
    scheduler = reader.desk.scheduler
    if short:
        scheduler.cap.tokens = 8
    else:
        reader.submit(40)
    image = reader.submit("cat", 1)
    while not image.finished:
        most = scheduler.cap.tokens
        step = reader.launched()
        assert step.num_tokens <= most or not step.generating
        reader.desk.bring(step)


def test_a_failed_step_of_the_encoder_leaves_no_features_to_others() -> None:
    reader = Reader()
    reader.submit("cat", 3)
    other = reader.submit("cat", 4)
    step = reader.launched()
    assert step.encoding is not None
    reader.desk.scheduler.fail(step, RuntimeError("pixels"))
    reader.toy.spoil(step.encoding)
    reader.steps()
    assert other.output.finish_reason == "length"


def test_rows_whose_features_were_never_made_are_not_at_fault() -> None:
    reader = Reader()
    first, other = reader.submit("cat", 3), reader.submit("cat", 4)
    encoding = reader.launched()
    reader.desk.scheduler.finish(first, "abort")
    rows = reader.launched()
    assert rows.sequences == [other]
    assert encoding.encoding is not None
    reader.desk.scheduler.fail(encoding, RuntimeError("pixels"))
    reader.toy.spoil(encoding.encoding)
    assert reader.desk.scheduler.fail(rows, LookupError()) == []
    reader.steps()
    assert other.output.finish_reason == "length"


def test_slices_behind_one_that_ran_out_of_memory_are_not_at_fault() -> None:
    reader = Reader(patches=16)
    sequence = reader.submit("cat", 3, patches=40)
    slices = [reader.launched(), reader.launched()]
    assert reader.desk.scheduler.run_out(slices[0], MemoryError()) == []
    assert reader.desk.scheduler.fail(slices[1], LookupError()) == []
    for step in slices:
        assert step.encoding is not None
        reader.toy.spoil(step.encoding)
    reader.steps()
    assert sequence.output.finish_reason == "length"


def test_what_a_failed_step_was_to_drop_is_dropped_later() -> None:
    reader = Reader(capacity=8, prefix_cache=False)
    reader.submit("cat", 1)
    reader.steps()
    reader.submit("dog", 1)
    step = reader.desk.scheduler.plan()  # the toy does not get it
    assert step is not None
    reader.desk.scheduler.fail(step, RuntimeError("packing"))
    reader.submit("cow", 1)
    reader.steps()
    assert [*reader.toy.keys.values()] == [b"cow".ljust(16)]


def test_what_is_begun_for_nobody_is_dropped() -> None:
    """Between its layers an image takes more memory than its features."""
    reader = Reader(patches=16)
    first = reader.submit("cat", 3, patches=40)
    reader.desk.bring(reader.launched())
    assert reader.toy.begun
    reader.desk.scheduler.finish(first, "abort")
    reader.submit("dog", 3)
    reader.steps()
    assert not reader.toy.begun


@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_read_their_own_images(seed: int) -> None:
    """Any order of steps in flight; the toy checks each row."""
    dice = random.Random(seed)
    two_way = dice.random() < 0.5
    reader = Reader(
        two_way=two_way,
        capacity=dice.choice([4, 16, 64]),
        patches=dice.choice([8, 16, 40]),
        chunk_size=dice.choice([3, 8, 64]),
        pages=dice.choice([24, 64]),
        prefix_cache=dice.random() < 0.7,
    )
    requests: list[Sequence] = []
    flights: list[Step] = []
    for _ in range(400):
        if len(requests) < 30 and dice.random() < 0.3:
            parts = [dice.choice([*"abcd", 1, 4, 9]) for _ in range(dice.randint(1, 5))]
            requests.append(reader.submit(*parts, 1, patches=dice.choice([8, 16, 50]), max_tokens=4))
        running = [each for each in requests if each.state is SequenceState.RUNNING]
        if running and dice.random() < 0.1:
            chosen, scheduler = dice.choice(running), reader.desk.scheduler
            match dice.randrange(3):
                case 0:
                    scheduler.retract(chosen)
                case 1:
                    scheduler.finish(chosen, "abort")
                case 2 if chosen.parked:
                    scheduler.queues.unpark(chosen)
                case 2:
                    scheduler.queues.park(chosen)
        if len(flights) < 3 and (step := reader.launch()) is not None:
            flights.append(step)
        elif flights:
            reader.desk.bring(flights.pop(0))
    while flights:
        reader.desk.bring(flights.pop(0))
    reader.steps()
    for each in requests:
        reader.desk.scheduler.queues.unpark(each)
    reader.steps(2000)
    assert all(each.finished for each in requests), f"{seed=}"


def test_words_are_negative_and_differ_by_image() -> None:
    found = words(b"cat", 1000)
    assert all(-(2**31) <= each < 0 for each in found)
    assert len({*found, *words(b"dog", 1000)}) > 1990
    assert words(b"cat", 7) == found[:7]
    assert shown([5, *found[:2], 6], 99) == [5, 99, 99, 6]
