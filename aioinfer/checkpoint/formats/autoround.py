"""AutoRound (arXiv 2309.05516): weights packed as those of GPTQ or AWQ, of other bits in some modules.

``packing_format`` is auto_round:auto_gptq or auto_round:auto_awq; auto_round alone, or with the name of a
library of kernels, is the second version of GPTQ's format. Source: https://github.com/intel/auto-round
"""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.formats.awq import AWQ
from aioinfer.checkpoint.formats.base import Format
from aioinfer.checkpoint.formats.compressed import LINEAR, Grouped
from aioinfer.checkpoint.formats.gptq import GPTQ
from aioinfer.errors import ConfigError, shown

__all__ = ["autoround"]

#: by what follows auto_round, the class and what its config states beside
_PACKINGS: dict[str, tuple[type[AWQ] | type[GPTQ], dict[str, Any]]] = {
    "auto_awq": (AWQ, {}),
    "awq": (AWQ, {}),
    "auto_gptq": (GPTQ, {}),
    "gptq": (GPTQ, {}),
    **dict.fromkeys(("", "exllamav2", "gptqmodel", "tritonv2", "marlin"), (GPTQ, {"format": "gptq_v2"})),
}
#: from so many bits on a module is not quantised
_PLAIN = 16
#: a name with one of these is a pattern
_SPECIAL = frozenset("*?[](){}|^$+\\")


def autoround(config: dict[str, Any]) -> Format:
    """The format of a config. Raises ConfigError."""
    stated = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    own, _, packing = stated.replace("autoround", "auto_round").partition(":")
    if own != "auto_round" or packing not in _PACKINGS or config.get("data_type", "int") != "int":
        what = f"{shown(stated)} of {shown(config.get('data_type', 'int'))}"
        raise ConfigError(f"model: AutoRound's packing {what} is not supported")
    form, more = _PACKINGS[packing]

    def made(**changes: Any) -> Format:
        read = ("bits", "group_size", "sym")
        return form({name: {**config, **changes}.get(name) for name in read} | more)

    groups: list[tuple[list[str], Format]] = [([LINEAR], made())]
    for name, settings in (config.get("extra_config") or {}).items():
        if settings.get("bits", config.get("bits")) < _PLAIN:
            target = f"re:{name}" if _SPECIAL.intersection(name) else name
            groups.append(([target], made(**settings)))
    return groups[0][1] if len(groups) == 1 else Grouped(groups)
