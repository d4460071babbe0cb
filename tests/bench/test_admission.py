"""The gain of packing on the workload that it was made for: exact figures of a cost model in virtual time."""

from __future__ import annotations

import argparse

from bench import admission
from tests.tiers import SECONDS, rest


@rest(SECONDS)
def test_packing_halves_the_wait_of_short_prompts_behind_long_ones() -> None:
    parser = argparse.ArgumentParser()
    admission.add_arguments(parser)
    options = parser.parse_args([])
    found = {way: admission.virtual(options, way) for way in ("fifo alone", "pack alone", "pack mixed")}
    fifo = found["fifo alone"]
    p99 = {way: line["ttft_ms"]["p99"] / fifo["ttft_ms"]["p99"] for way, line in found.items()}
    assert p99["pack alone"] <= 0.51, "49 % less"
    assert p99["pack mixed"] <= 0.30, "70 % less"
    for way in ("pack alone", "pack mixed"):
        assert found[way]["tokens_per_s"] >= 1.05 * fifo["tokens_per_s"]
        # The long prompts pay, but no more than this.
        assert max(found[way]["long_ttft_ms"]) <= max(fifo["long_ttft_ms"])
