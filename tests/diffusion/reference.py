"""Every algorithm once more, in the plainest way: one row, lists, loops, no code of the package."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.sampling.support import reference_floor
from tests.sampling.test_noise import written_down

DEFAULTS: dict[str, dict[str, Any]] = {
    "low_confidence": {"threshold": 0.95},
    "static_steps": {},
    "factor": {"factor": 1.0},
    "entropy_bound": {"entropy_bound": 0.15},
    "joint_threshold": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edits": 16, "penalty": 0.0},
    "joint_threshold_indel": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edits": 16},
}
#: the tokens that delete and split
DELETE, SPLIT = 11, 2


@dataclass
class Proposed:
    token: int
    confidence: float
    entropy: float
    logprob: float


@dataclass
class Row:
    """One block of one request, and everything its algorithm remembers."""

    algorithm: str
    given: list[int]
    size: int
    mask_id: int
    start: int
    params: dict[str, Any]
    sampling: dict[str, Any]
    ids: list[int] = field(init=False)
    known: list[bool] = field(init=False)
    written_in: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    rounds: int = 0
    post_edits: int = 0
    #: by position, whether it is a mask that was not there at first
    inserted: list[bool] = field(init=False)
    #: the block before each round; by position, the tokens that were chosen, the last one last
    blocks: list[list[int]] = field(default_factory=list)
    chosen: dict[int, list[int]] = field(default_factory=dict)
    done: bool = False
    changed: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        unknown = self.size - len(self.given)
        self.ids = self.given + [self.mask_id] * unknown
        self.known = [True] * len(self.given) + [False] * unknown
        self.written_in = [-1] * self.size
        self.logprobs = [0.0] * self.size
        self.inserted = [False] * self.size
        self.done = unknown == 0
        self.params = {**DEFAULTS[self.algorithm], **self.params}

    def step(self, logits: torch.Tensor) -> None:
        """One round; logits [B, V]."""
        self.changed = False
        if self.done:
            return
        if self.algorithm == "joint_threshold_indel":
            self.failed = not self.joint_threshold_indel(logits)
            self.done |= self.failed
            self.rounds += 1
            return
        answer = range(len(self.given), self.size)
        masked = [at for at in answer if not self.known[at]]
        proposals = {}
        for at in answer if self.algorithm == "joint_threshold" else masked:
            line = logits[at].float().numpy().copy()
            line[self.mask_id] = -np.inf
            if self.params.get("penalty") and at > 0:
                line[self.ids[at - 1]] -= np.float32(self.params["penalty"])
            if np.isnan(line).any() or line.max() in (np.inf, -np.inf):
                self.failed = self.done = True
                self.rounds += 1
                return
            proposals[at] = self.propose(line, at)
        writes = getattr(self, self.algorithm)(proposals, masked)
        for at in writes:
            self.ids[at], self.logprobs[at] = proposals[at].token, proposals[at].logprob
            self.known[at], self.written_in[at] = True, self.rounds
        self.changed = bool(writes)
        full = all(self.known)
        if self.algorithm == "joint_threshold":
            self.done = not writes or (full and self.post_edits >= self.params["max_post_edits"])
        else:
            self.done = full
        self.rounds += 1

    def propose(self, line: Any, at: int) -> Proposed:
        """The likeliest token or the one that is drawn, from logits [V]."""
        relative = line - line.max()
        weights = [float(weight) for weight in torch.from_numpy(relative).exp()]
        mass = math.fsum(weights)
        shares = [weight / mass for weight in weights]
        entropy = -math.fsum(share * math.log(share) for share in shares if share > 0)
        if self.sampling["temperature"] == 0:
            token = int(line.argmax())
            confidence = float(np.float32(weights[token]) / np.float32(mass))
        else:
            token, confidence = self.draw(relative, at)
        logprob = math.log(shares[token]) if shares[token] > 0 else float(relative[token]) - math.log(mass)
        return Proposed(token, confidence, entropy, logprob)

    def draw(self, relative: Any, at: int) -> tuple[int, float]:
        with np.errstate(over="ignore"):
            scaled = relative / np.float32(self.sampling["temperature"])
        floor = reference_floor(scaled, self.sampling)
        kept = [token for token in range(len(scaled)) if scaled[token] >= floor and scaled[token] > -np.inf]
        sums = {}
        for token in kept:
            bits = written_down(self.sampling["seed"], self.start + at + self.rounds * 2**32, token)
            uniform = (bits % 2**31 + 0.5) / 2**31
            sums[token] = float(scaled[token]) - math.log(-math.log1p(-uniform))
        token = max(sums, key=lambda token: sums[token])
        weights = torch.from_numpy(scaled).exp().numpy()
        return token, float(weights[token] / np.float32(math.fsum(weights[kept])))

    def due(self, masked: list[int]) -> int:
        if self.params.get("steps") is None:
            return 1
        steps: int = self.params["steps"]
        return math.ceil(len(masked) / max(1, steps - self.rounds))

    def low_confidence(self, proposals: dict[int, Proposed], masked: list[int]) -> list[int]:
        surest = sorted(masked, key=lambda at: (-proposals[at].confidence, at))
        threshold = np.float32(self.params["threshold"])
        above = [at for at in masked if proposals[at].confidence > threshold]
        return above if len(above) >= self.due(masked) else surest[: self.due(masked)]

    def static_steps(self, proposals: dict[int, Proposed], masked: list[int]) -> list[int]:
        """LLaDA's table: n // steps each round, one more in the first n % steps."""
        unknown = self.size - len(self.given)
        steps = self.params.get("steps") or unknown
        count = unknown // steps + (self.rounds < unknown % steps)
        return sorted(masked, key=lambda at: (-proposals[at].confidence, at))[:count]

    def factor(self, proposals: dict[int, Proposed], masked: list[int]) -> list[int]:
        surest = sorted(masked, key=lambda at: (-proposals[at].confidence, at))
        count = 1
        for n in range(2, len(masked) + 1):
            if proposals[surest[n - 1]].confidence < 1 - self.params["factor"] / (n + 1):
                break
            count = n
        return surest[: max(count, self.due(masked))]

    def entropy_bound(self, proposals: dict[int, Proposed], masked: list[int]) -> list[int]:
        lowest = sorted(masked, key=lambda at: (np.float32(proposals[at].entropy), at))
        count, spent = 0, 0.0
        while count < len(lowest) and spent <= self.params["entropy_bound"]:
            spent += proposals[lowest[count]].entropy
            count += 1
        return lowest[: max(count, self.due(masked))]

    def joint_threshold(self, proposals: dict[int, Proposed], masked: list[int]) -> list[int]:
        writes = []
        if masked:
            writes = self.low_confidence(proposals, masked)
        else:
            self.post_edits += 1
            if self.post_edits > self.params["max_post_edits"]:
                return []
        edit_threshold = np.float32(self.params["edit_threshold"])
        for at in proposals:
            proposed = proposals[at]
            if self.known[at] and proposed.token != self.ids[at] and proposed.confidence > edit_threshold:
                writes.append(at)
        return writes

    def proposed(self, logits: torch.Tensor, at: int, banned: Iterable[int] = ()) -> Proposed | None:
        """At one position, without the mask and what is banned; None: that is not possible."""
        line = logits[at].float().numpy().copy()
        line[[self.mask_id, *banned]] = -np.inf
        bad = np.isnan(line).any() or line.max() in (np.inf, -np.inf)
        return None if bad else self.propose(line, at)

    def joint_threshold_indel(self, logits: torch.Tensor) -> bool:
        """One round; False if it fails."""
        answer = range(len(self.given), self.size)
        proposals: dict[int, Proposed] = {}
        for at in answer:
            found = self.proposed(logits, at)
            if found is None:
                return False
            proposals[at] = found
        masked = [at for at in answer if not self.known[at]]
        original = [at for at in masked if not self.inserted[at]]
        most = self.params["max_post_edits"]
        if not original:
            self.post_edits += 1
        last = self.rounds + 1 > self.size + most
        last |= self.post_edits >= most if most > 0 else not original
        fill = masked
        if original and not last:
            threshold = np.float32(self.params["threshold"])
            least = max(1 + len(masked) - len(original), self.due(masked))
            fill = [at for at in masked if proposals[at].confidence > threshold]
            if len(fill) < least:
                fill = sorted(masked, key=lambda at: (-proposals[at].confidence, at))[:least]
            if most == 0 and set(original) <= set(fill):
                last, fill = True, masked
        edit_threshold = np.float32(self.params["edit_threshold"])
        changes = [
            at
            for at in answer
            if self.known[at]
            and proposals[at].token != self.ids[at]
            and proposals[at].confidence > edit_threshold
        ]
        if not fill + changes:
            self.done = True
            return True
        writes = sorted(fill + changes)
        if last:
            for at in writes:
                if proposals[at].token in (DELETE, SPLIT):
                    found = self.proposed(logits, at, (DELETE, SPLIT))
                    if found is None:
                        return False
                    proposals[at] = found
        elif self.ids in self.blocks[-self.size :]:
            at = min(writes, key=lambda at: (proposals[at].confidence, at))
            tried = self.chosen.get(at, [])[-9:]
            proposals[at] = self.proposed(logits, at, tried) or proposals[at]
        self.blocks.append(list(self.ids))
        for at in writes:
            earlier = self.chosen.setdefault(at, [])
            if proposals[at].token in earlier:
                earlier.remove(proposals[at].token)
            earlier.append(proposals[at].token)
        self.edit({at: proposals[at] for at in writes})
        self.changed = self.ids != self.blocks[-1]
        self.done = last
        return True

    def edit(self, writes: dict[int, Proposed]) -> None:
        """Write, delete and split from the left to the right."""
        blank = (self.mask_id, False, self.rounds, 0.0, True)
        columns = zip(self.ids, self.known, self.written_in, self.logprobs, self.inserted, strict=True)
        block: list[tuple[int, bool, int, float, bool]] = []
        for at, old in enumerate(columns):
            new = writes.get(at)
            if new is None or (self.known[at] and new.token == self.ids[at]):
                block.append(old)
            elif new.token == SPLIT:
                block += [blank, old]
            elif new.token != DELETE:
                block.append((new.token, True, self.rounds, new.logprob, False))
        block = (block + [blank] * self.size)[: self.size]
        for name, values in zip(
            ("ids", "known", "written_in", "logprobs", "inserted"), zip(*block, strict=True), strict=True
        ):
            setattr(self, name, list(values))
