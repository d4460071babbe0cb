"""GPTQ: 2 to 8 bits in groups with scales and zeros, ``weight = scale * (q - zero)`` (arXiv 2210.17323).

    qweight [inner * bits / 32, outputs], int32     a word has neighbours along the inner dimension; of 3 bits
                                                    three words have 32
    qzeros  [groups, outputs * bits / 32]           a word has neighbouring outputs; in the first version of
                                                    the format less 1 in each place
    scales  [groups, outputs]
    g_idx   [inner]                                 the group of each element, if those are not in order

Files of symmetric weights state the first version and hold zeros of the second, too: there the zeros tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import Format, Stored, ZeroPoints, unpacked
from aioinfer.checkpoint.formats.compressed import LINEAR, Grouped
from aioinfer.checkpoint.formats.fields import check_fields
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["GPTQ", "gptq"]

#: settings that some modules may have for themselves
_OWN = frozenset({"bits", "damp_percent", "desc_act", "group_size", "mse", "sym"})
#: 1 in each place of a word; of 3 bits places are no part of one
_ONES = {2: 0x55555555, 3: 0, 4: 0x11111111, 8: 0x01010101}


def gptq(config: dict[str, Any]) -> Format:
    """The format of a config, whose ``dynamic`` may give settings of their own to patterns of modules. Raises
    ConfigError."""
    groups: list[tuple[list[str], Format]] = [([LINEAR], GPTQ(config))]
    for pattern, settings in (config.get("dynamic") or {}).items():
        # Patterns with a minus say which modules are not quantised. The tensors say so, too.
        if not pattern.startswith("-:") and any(config.get(key) != settings[key] for key in settings):
            check_fields(settings, _OWN, f"{shown(pattern)} in dynamic")
            groups.append(([f"re:{pattern.removeprefix('+:')}"], GPTQ({**config, **settings})))
    return groups[0][1] if len(groups) == 1 else Grouped(groups)


class GPTQ(ZeroPoints):
    """The format of AutoGPTQ and GPTQModel."""

    marker = "qweight"
    others = frozenset({"qzeros", "scales", "g_idx"})

    def __init__(self, config: dict[str, Any]) -> None:
        bits = config.get("bits")
        if type(bits) is not int or bits not in _ONES:
            raise ConfigError(f"model: GPTQ of {shown(bits)} bits is not supported, 2, 3, 4 and 8 are")
        self.bits = bits
        version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if version not in ("gptq", "gptq_v2"):
            raise ConfigError(f"model: GPTQ in the layout {shown(version)} is not supported")
        self._second = version == "gptq_v2"
        self._centred = config.get("sym") is True
        self._shuffled = config.get("desc_act") is True

    def shape(self, stored: Stored) -> tuple[int, int]:
        words, outputs = stored.shape("qweight")
        inner, rest = divmod(words * 32, self.bits)
        groups, width = stored.shape("scales")
        ordered = not stored.has("g_idx") or stored.shape("g_idx") == (inner,)
        if self._shuffled and groups > 1:
            ordered = stored.shape("g_idx") == (inner,)
        zeros = groups, outputs * self.bits // 32
        if rest or width != outputs or stored.shape("qzeros") != zeros or not ordered:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return outputs, inner

    def groups(self, stored: Stored) -> int:
        return stored.shape("scales")[0]

    def order(self, stored: Stored) -> torch.Tensor | None:
        import torch

        inner, groups = self.shape(stored)[1], self.groups(stored)
        if inner % groups == 0:
            runs = torch.arange(inner) // (inner // groups)
            if not stored.has("g_idx") or torch.equal(stored.read("g_idx").long(), runs):
                return None
        return stored.group_index("g_idx", groups)

    def parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        values = unpacked(stored.typed("qweight", "int32").T.contiguous(), self.bits)
        words, second = stored.typed("qzeros", "int32"), self._second
        if self._centred:
            half = 2 ** (self.bits - 1)
            second = bool((unpacked(words, self.bits) == half).all())
        if not second:
            # In whole words: a place that was 0 has borrowed from the next.
            words = words + torch.tensor(_ONES[self.bits], dtype=torch.int32)
        numbers = unpacked(words, self.bits)
        if not second and self.bits == 3:
            numbers = (numbers + 1) & 7
        zeros = numbers.T.float()
        if self._centred and bool((zeros != half).any()):
            raise ConfigError(f"model: {stored.module} is said to be symmetric, and its zeros are not")
        return values, stored.floats("scales").T.contiguous(), zeros
