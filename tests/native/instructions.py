"""Instructions of ARM's products: ``python -m tests.native.instructions``.

Counted in the assembly of their innermost loops, as the compiler of the package ziglang writes it, for one
row and for four: for each product of two numbers, instructions of all kinds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aioinfer.native.levels import FLAGS, SOURCE
from tests.native.emulation import ARM

__all__ = ["LEVELS", "per_product"]

#: name -> flags for the processors: those of the wheel, and what multiplies without their instructions
LEVELS = {"plain": "-mcpu=generic -DAIOINFER_PLAIN_DOT=8"} | {name: flags for name, (flags, _) in ARM.items()}
_TARGET = ("-target", "aarch64-linux-musl")
_COMPILER = (sys.executable, "-m", "ziglang", "c++")
#: products of two numbers by an instruction with a vector of 16 bytes
_PRODUCTS = {
    "bfmmla": 16,
    "bfdot": 8,
    "fmla": 4,
    "smmla": 32,
    "sdot": 16,
    "usdot": 16,
    "smull": 8,
    "smlal": 8,
}
_PRODUCTS |= {"smull2": 8, "smlal2": 8, "mul": 4, "mla": 4, "mls": 4}
#: of a kind of weights, the function that multiplies them
_FUNCTIONS = {"packed": "packed_{rows}", "int8": "multiply_stripILi8ELb0ELi{rows}E"}
_FUNCTIONS |= {"int4": "multiply_stripILi4ELb0ELi{rows}E"}


def per_product(level: str, source: Path = SOURCE) -> dict[tuple[str, int], float]:
    """Instructions for each product, by kind of weights and number of rows."""
    with tempfile.TemporaryDirectory() as place:
        target = str(Path(place) / "products.s")
        flags = [*_TARGET, *LEVELS[level].split(), *FLAGS, "-g0", f"-I{source}"]
        program = str(Path(__file__).with_name("products.cpp"))
        subprocess.run([*_COMPILER, *flags, "-S", program, "-o", target], check=True, capture_output=True)
        lines = Path(target).read_text().splitlines()
    return {
        (kind, rows): min(_loops(_body(lines, name.format(rows=rows))))
        for kind, name in _FUNCTIONS.items()
        for rows in (1, 4)
    }


def _body(lines: list[str], name: str) -> list[str]:
    """The lines of a function, by a part of its name."""
    begin = next(at for at, line in enumerate(lines) if re.match(rf"\w*{re.escape(name)}\w*:", line))
    end = next(at for at in range(begin, len(lines)) if ".cfi_endproc" in lines[at])
    return lines[begin:end]


def _loops(body: list[str]) -> Iterator[float]:
    """Instructions for each product of every loop that multiplies and has no other inside."""
    labels: dict[str, int] = {}
    for at, line in enumerate(body):
        if label := re.match(r"(\.\w+):", line):
            labels[label[1]] = at
        found = re.match(r"\s+(?:b(?:\.?[a-z]{2})?|cbn?z|tbn?z)\s.*?(\.\w+)$", line)
        if found and found[1] in labels:
            inside = body[labels[found[1]] : at + 1]
            steps = [each.split() for each in inside if re.match(r"\s+[a-z]", each)]
            products = sum(_PRODUCTS.get(step[0], 0) for step in steps if step[1:] and step[1][0] == "v")
            if products:
                yield len(steps) / products
            # What encloses this loop is none that is innermost.
            labels = {name: place for name, place in labels.items() if place > at}


def main() -> None:
    for level in LEVELS:
        counts = per_product(level)
        said = ", ".join(f"{kind} x {rows}: {count:.3f}" for (kind, rows), count in counts.items())
        sys.stdout.write(f"{level}: {said}\n")


if __name__ == "__main__":
    main()
