"""``python -m bench scheduler``: cost of scheduling itself, without a device.

Microseconds of plan() and resolve() for one step in which every running request decodes a token, by the
number of running and of waiting requests, and by the number of pages in the prefix cache. The last column
divides by the running requests. Requests wait for slots, or, in the rows marked so, for pages: then every
plan looks at the queue, in vain. Everything is real but the device and the text.
"""

from __future__ import annotations

import argparse
import random
import time

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig, policy_names
from aioinfer.params import SamplingParams
from aioinfer.request import Output, Request
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Outcome
from bench.report import Report

PAGE_SIZE = 16
PROMPT, OUTPUT = 32, 4000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 1_000, 100_000])
    parser.add_argument("--cached-pages", type=int, nargs="*", default=[0, 100_000])
    parser.add_argument("--policy", choices=policy_names(), default="fcfs")
    parser.add_argument("--steps", type=int, default=200, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per number of running, waiting and cached."""
    shapes = [(waiting, 0, "slots") for waiting in options.waiting]
    shapes += [(waiting, 0, "pages") for waiting in options.waiting if waiting]
    shapes += [(0, cached, "slots") for cached in options.cached_pages if cached]
    for running in options.running:
        for waiting, cached, short in shapes:
            scheduler = make_scheduler(running, waiting, cached, short, options.policy)
            plan, resolve = measure(scheduler, options.steps, options.rounds)
            report.row(
                wait_for=short,
                running=running,
                waiting=waiting,
                cached_pages=cached,
                plan_us=1e6 * plan,
                resolve_us=1e6 * resolve,
                us_per_row=1e6 * (plan + resolve) / running,
            )


def make_scheduler(running: int, waiting: int, cached_pages: int, short: str, policy: str) -> Scheduler:
    """A scheduler in the middle of its work: the running ones decode, the waiting ones find no slot (or, if
    ``short`` is "pages", no pages)."""
    rng = random.Random(1)
    pages = cached_pages + running * ((PROMPT + OUTPUT) // PAGE_SIZE + 1)
    memory = Memory(PageAllocator(pages, PAGE_SIZE), SlotPool(3 * running + 3))
    config = EngineConfig(
        max_running_requests=running + (short == "pages"),
        max_step_tokens=max(2048, 40 * running),
        chunk_size=512,
        policy=policy,
        new_token_ratio=1.0,
        min_new_token_ratio=1.0,
    )
    scheduler = Scheduler(memory, config)
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    keys = iter(range(1, 1 << 30))

    def submit(count: int, prompt: int, output: int) -> None:
        for _ in range(count):
            ids = [rng.randrange(3, 1 << 16) for _ in range(prompt)]
            made = Output(Request(params=params))
            made.prompt_ids = ids
            scheduler.submit(Sequence(next(keys), made, stop_ids=frozenset({2}), max_length=prompt + output))

    # Prompts of four pages fill the cache; each has its own path.
    while memory.pages.cached < cached_pages:
        submit(min(running, -(-(cached_pages - memory.pages.cached) // 4)), 4 * PAGE_SIZE, 1)
        while scheduler.queues.has_unfinished:
            turn(scheduler)
    submit(running, PROMPT, OUTPUT)
    while len(scheduler.queues.batch) < running:
        turn(scheduler)
    submit(waiting, PROMPT, OUTPUT)
    for _ in range(20):
        turn(scheduler)
    return scheduler


def turn(scheduler: Scheduler) -> tuple[float, float]:
    """Plan and resolve a step; seconds of each."""
    start = time.perf_counter()
    step = scheduler.plan()
    planned = time.perf_counter()
    assert step is not None
    outcome = Outcome([5] * step.num_rows)
    again = time.perf_counter()
    scheduler.resolve(step, outcome)
    return planned - start, time.perf_counter() - again


def measure(scheduler: Scheduler, steps: int, rounds: int) -> tuple[float, float]:
    """Seconds of plan() and of resolve() per step, in the median round."""
    samples: list[tuple[float, float]] = []
    for _ in range(rounds):
        times = [turn(scheduler) for _ in range(steps)]
        samples.append((sum(plan for plan, _ in times) / steps, sum(each for _, each in times) / steps))
    samples.sort(key=sum)
    return samples[len(samples) // 2]
