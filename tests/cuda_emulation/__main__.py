"""``python -m tests.cuda_emulation [OPTIONS] -- COMMAND ...``: run a command beside an emulated device."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aioinfer.native.build import find_compiler

_HERE = Path(__file__).parent
_RUNTIME = ("state.cpp", "streams.cpp", "memory.cpp", "device.cpp", "unsupported.cpp")
_ROOT = _HERE.parents[1]
_PYTEST = (
    "-p tests.cuda_emulation.compute -p tests.cuda_emulation.stand_ins"
    # what the interpreter of Triton 3.6 does with numpy
    " -W 'ignore:Conversion of an array:DeprecationWarning'"
)


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        place = environment(folder, options)
        if options.compute:
            # That a torch for CUDA is there and its work done, when it has to be.
            subprocess.run([sys.executable, str(_HERE / "check.py")], env=place, check=True)
        return subprocess.run(options.command, env=place, check=False).returncode


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulation")
    parser.add_argument("--compute", action="store_true", help="have the CPU do the work (pytest only)")
    parser.add_argument("--order", choices=["early", "late"], default="early", help="when work is done")
    parser.add_argument("--gib", type=float, default=139.8, help="memory of the device")
    parser.add_argument(
        "--call-us", type=float, default=0.0, help="what a launch costs the host; graphs thrice"
    )
    parser.add_argument("--kernel-us", type=float, default=2.0, help="what a kernel takes on the device")
    parser.add_argument("--graph-us", type=float, default=0.0, help="what a graph of over 100 kernels takes")
    parser.add_argument("--stats", action="store_true", help="say at the end what was called how often")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def find_headers() -> Path:
    """CUDA's, of the packages nvidia-cuda-runtime and nvidia-cuda-crt. Exits if they are not there."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found is not None else ():
        headers = Path(place) / "cu13" / "include"
        if (headers / "crt" / "host_defines.h").exists():
            return headers
    sys.exit("there are no headers of CUDA 13: install nvidia-cuda-runtime and nvidia-cuda-crt")


def build(folder: Path) -> None:
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    # Its functions call its own, also in a process in which torch has loaded the real ones before.
    own = [f"-Wl,--version-script={versions}", "-Wl,-Bsymbolic", "-ldl", "-lpthread"]
    _compile(folder / "libcudart.so.13", _RUNTIME, own)
    link = [f"-L{folder}", "-l:libcudart.so.13", f"-Wl,-rpath,{folder}"]
    _compile(folder / "libcuda.so.1", ["driver.cpp"], link)
    _compile(folder / "libblas.so", ["blas.cpp"], link)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def _compile(library: Path, sources: Sequence[str], arguments: Sequence[str]) -> None:
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", f"-I{find_headers()}"]
    flags.append(f"-Wl,-soname,{library.name}")
    files = [str(_HERE / source) for source in sources]
    subprocess.run([*find_compiler(), *flags, *files, "-o", str(library), *arguments], check=True)


def environment(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    added = {
        "LD_PRELOAD": f"{folder / 'libcudart.so.13'} {folder / 'libblas.so'}",
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": str(_ROOT),
        # With "0" kernels are compiled although there is no GPU to be seen.
        "TRITON_INTERPRET": "1" if options.compute else "0",
        "EMULATED_LATE": "1" if options.order == "late" else "0",
        "EMULATED_COMPUTE": "1" if options.compute else "0",
        "EMULATED_GIB": str(options.gib),
        "EMULATED_CALL_US": str(options.call_us),
        "EMULATED_KERNEL_US": str(options.kernel_us),
        "EMULATED_GRAPH_US": str(options.graph_us),
        "EMULATED_STATS": "1" if options.stats else "0",
    }
    if options.compute:
        added["PYTEST_ADDOPTS"] = _PYTEST
    return {**os.environ, **added}


if __name__ == "__main__":
    sys.exit(main())
