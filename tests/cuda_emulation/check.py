"""Run before a command with ``--compute``: operations, copies and replays are done, and done in time."""

from __future__ import annotations

import os

import torch

from tests.cuda_emulation import compute


def main() -> None:
    late = os.environ["EMULATED_LATE"] == "1"
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x = torch.zeros(4, device="cuda")
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            y = x * 2 + 1
        x.fill_(3.0)
        graph.replay()
        host = torch.zeros(4, pin_memory=True)
        host.copy_(y, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        assert host.tolist() == [0.0] * 4, "a result came before it was waited for"
        event.synchronize()
        assert host.tolist() == [7.0] * 4, "a replay has not done its work"
        host.fill_(1.0)
        x.copy_(host, non_blocking=True)
        host.fill_(2.0)
        assert x.tolist() == [2.0 if late else 1.0] * 4, "the host's memory was not read when it should be"
    assert torch.equal(x, x) is True
    assert torch.equal(x, x + 1) is False
    compute.enqueue(lambda: 1 / 0, "failing")
    assert "ZeroDivisionError" in compute.take_failures(), "nobody is told of work that fails"
    assert not compute.take_failures()


if __name__ == "__main__":
    main()
