"""A Chromium to test pages with: where it is, and how to get one from npm.

``python -m tests.browser.chromium`` fetches a headless build that needs no installer: npm's package
``@sparticuz/chromium`` holds one, compressed. It needs ``npm`` and ``node``, and takes 200 MB of the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

__all__ = ["NONE", "OPTIONS", "fetched", "find"]

PACKAGE = "@sparticuz/chromium@153.0.0"
#: why tests of pages are skipped
NONE = (
    "no Chromium: set AIOINFER_CHROMIUM, put one on the PATH, or run `python -m tests.browser.chromium` (npm)"
)
#: of the command: tests run as root in containers, without a graphics card
OPTIONS = ["--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
_UNPACK = (
    "const fs = require('fs'), zlib = require('zlib');"
    "const [from, to] = process.argv.slice(1);"
    "fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)), {mode: 0o755});"
)


def fetched() -> Path:
    """Where the fetched one is."""
    cache = os.environ.get("AIOINFER_CACHE") or Path.home() / ".cache" / "aioinfer"
    return Path(cache) / "browser" / PACKAGE.rpartition("@")[2] / "chromium"


def find() -> Path | None:
    """The program, or None."""
    given = os.environ.get("AIOINFER_CHROMIUM")
    if given is not None:
        return Path(given)
    if fetched().exists():
        return fetched()
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return None if found is None else Path(found)


def _fetch() -> Path:
    """Download and decompress. No script of the package runs."""
    program = fetched()
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as name:
        place = Path(name)
        pack = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", name, PACKAGE]
        subprocess.run(pack, check=True, cwd=name, stdout=subprocess.DEVNULL)
        (archive,) = place.glob("*.tgz")
        with tarfile.open(archive) as opened:
            opened.extract("package/bin/chromium.br", place, filter="data")
        unpacked = place / "chromium"
        subprocess.run(
            ["node", "-e", _UNPACK, str(place / "package/bin/chromium.br"), str(unpacked)], check=True
        )
        unpacked.replace(program)
    return program


if __name__ == "__main__":
    sys.stdout.write(f"{_fetch()}\n")
