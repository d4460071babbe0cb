"""Logprobs as steps bring them, in the records of outputs."""

from __future__ import annotations

from collections import abc

from aioinfer.execution.device import StepResult
from aioinfer.outputs import TokenLogprob
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step

__all__ = ["complete_logprobs", "extend", "record_logprobs"]


def record_logprobs(step: Step, result: StepResult) -> None:
    """Keep exactly one record for each token of the outputs."""
    decodes = step.generating.sequences
    for index in result.logprobs.keys() | result.forced.keys():
        sequence = decodes[index] if index < len(decodes) else step.prefilling[index - len(decodes)].sequence
        if sequence.params.logprobs is None:
            continue
        # After the end of the output there are none.
        missing = len(sequence.output_ids) - len(sequence.output.logprobs)
        if missing > 0:
            sequence.output.logprobs += result.logprobs.get(index, ())[:missing]
            complete_logprobs(sequence)


def complete_logprobs(sequence: Sequence) -> None:
    """Tokens that were not sampled were certain."""
    logprobs, ids = sequence.output.logprobs, sequence.output_ids
    logprobs += [TokenLogprob(token, 0.0, ()) for token in ids[len(logprobs) :]]


def extend(known: list[TokenLogprob], first: int, logprobs: abc.Sequence[TokenLogprob]) -> None:
    """Append records of the prompt's tokens from the ``first`` on."""
    # A step from before a retraction may have recorded some of them already.
    there = len(known) - first
    if there >= 0:
        known += logprobs[there:]
