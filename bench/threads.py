"""``python -m bench threads``: one LLM that several threads call.

Every thread asks the bundled model for sums, one call for each, as the workers of a WSGI server do: the calls
share steps. Numbers of threads take turns, in rounds of alternating order. ``of_one`` is the rate beside that
of a single thread in the same round; an answer that is not the sum is an error.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aioinfer import LLM, EngineConfig, SamplingParams
from bench.report import Report

__all__ = ["wrong_sums"]

_PARAMS = SamplingParams(temperature=0, max_tokens=16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 8, 32], help="threads that call")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--sums", type=int, default=320, help="of a number of callers in a round")
    parser.add_argument("--rounds", type=int, default=7)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row for each number of callers."""
    counts = sorted({1, *options.callers})
    rates: dict[int, list[float]] = {count: [] for count in counts}
    wrong: dict[int, list[str]] = {count: [] for count in counts}
    with LLM(EngineConfig(threads=options.threads)) as llm:
        report.fact("model", llm.config.model)
        wrong_sums(llm, 1, 10)
        for number in range(options.rounds):
            for count in counts[:: -1 if number % 2 else 1]:
                each = -(-options.sums // count)
                begin = time.perf_counter()
                wrong[count] += wrong_sums(llm, count, each)
                rates[count].append(count * each / (time.perf_counter() - begin))
    for count in counts:
        shares = [rate / one for rate, one in zip(rates[count], rates[1], strict=True)]
        report.row(
            callers=count,
            sums=options.rounds * count * -(-options.sums // count),
            wrong=len(wrong[count]),
            sums_per_s=statistics.median(rates[count]),
            of_one=statistics.median(shares),
            of_one_min=min(shares),
            of_one_max=max(shares),
        )
        for text in wrong[count][:3]:
            report.error(f"{count} callers: {text}")


def wrong_sums(llm: LLM, callers: int, each: int) -> list[str]:
    """Ask for ``each`` sums, one call for each, on every one of so many threads, which begin together;
    returns the answers that are not right."""
    begin = threading.Barrier(callers)

    def work(number: int) -> list[str]:
        begin.wait(60)
        wrong = []
        for other in range(each):
            left, right = 10 + number, 10 + other % 90
            chat: list[Any] = [{"role": "user", "content": f"What is {left} + {right}?"}]
            text = llm.generate([chat], _PARAMS, progress=False)[0].text
            if text != f"{left} + {right} = {left + right}":
                wrong.append(text)
        return wrong

    with ThreadPoolExecutor(callers) as threads:
        return [text for found in threads.map(work, range(callers)) for text in found]
