"""An empty root: a folder with an interpreter, a shell and no compiler, in which programs run by chroot.

    python -m tests.deploy.root WHEEL       installs the wheel there, and serves: seconds, kernels, sizes

It has what python:X-slim has and a start needs: the interpreter that runs this without its packages, some
programs, the libraries that these name, certificates. ``pip`` is this machine's ``uv pip``, which links
packages from its cache and so needs neither minutes nor disk. Needs root's rights, for chroot and mounts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

__all__ = ["Root", "assemble", "missing", "pieces", "serving_url"]

_PROGRAMS = ("sh", "env", "cat", "chmod", "chown", "cp", "id", "ls", "mkdir", "mv", "rm", "uname", "useradd")
#: of Debian's essential packages, which wheels expect
_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "libutil.so.1", "librt.so.1", "libresolv.so.2")
#: of the interpreter's library folder: what is no part of python:X-slim, or needs a display
_LEFT_OUT = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "config-*", "*.a", "idlelib", "tkinter", "_tkinter*"
)
_FILES = ("etc/hosts", "etc/resolv.conf", "etc/nsswitch.conf", "etc/login.defs")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: of the package itself it makes copies: what runs natively is not read through links
_PIP = """#!/bin/sh -e
[ "$1" = --python ] && export VIRTUAL_ENV="${2%/bin/python}" && shift 2
uv pip "$@"
cd "$VIRTUAL_ENV"/lib/python*/site-packages
cp -rL aioinfer copied && rm -r aioinfer && mv copied aioinfer
"""
_CACHE = "/var/cache/uv"
_QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": True}


def missing() -> str | None:
    """Why no root can be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root's rights, for chroot and mounts in a namespace of their own"
    for program in ("uv", "unshare", "mount", "chroot", "ldd", *_PROGRAMS):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "probe", "/tmp"]
    probe = subprocess.run(command, capture_output=True, text=True)
    return None if probe.returncode == 0 else f"no mounts in a namespace: {probe.stderr.strip()}"


@dataclass(frozen=True)
class Root:
    """What processes see as /."""

    path: Path
    #: what they see of this machine besides /dev, /proc and /sys: a folder there, and which one here it is
    binds: Mapping[str, Path] = field(default_factory=dict)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        user: int = 0,
        cwd: str = "/",
        read_only: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a program with this environment and no other; its output is piped, and its pid the result's.

        Where the root is read only, ``binds`` are not.
        """
        script = ["set -e", 'mount --rbind "$ROOT" "$ROOT"']
        script += [f'mount --rbind /{name} "$ROOT/{name}"' for name in ("dev", "proc", "sys")]
        for there, here in self.binds.items():
            (self.path / there.lstrip("/")).mkdir(parents=True, exist_ok=True)
            script.append(f'mount --bind "{here}" "$ROOT{there}"')
        if read_only:
            script.append('mount -o remount,bind,ro "$ROOT"')
        script.append(
            'exec chroot --userspec="$OWNER:$OWNER" --groups="$OWNER" "$ROOT" env -i -C "$CWD" "$@"'
        )
        settings = [f"{name}={value}" for name, value in env.items()]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *settings, *command],
            env={**os.environ, "ROOT": str(self.path), "OWNER": str(user), "CWD": cwd},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], *, env: Mapping[str, str], user: int = 0, cwd: str = "/") -> str:
        """Run a program to its end and return its output; raises CalledProcessError, which has the output."""
        process = self.start(command, env=env, user=user, cwd=cwd)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, [*command], output)
        return output


#: of every program in a root, for ``pip``
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin",
    "SSL_CERT_FILE": _CERTIFICATES,
    "UV_CACHE_DIR": _CACHE,
    "UV_LINK_MODE": "symlink",
}


def assemble(place: Path) -> Root:
    """Make a root in a folder that is not there yet."""
    for name in (
        "etc/ssl/certs",
        "usr/bin",
        "usr/lib",
        "usr/local/bin",
        "usr/local/lib",
        "dev",
        "proc",
        "sys",
    ):
        (place / name).mkdir(parents=True)
    (place / "root").mkdir(mode=0o700)
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (place / name).symlink_to(f"usr/{name.removeprefix('s')[:3]}")
    programs = [place / "usr/bin" / name for name in _PROGRAMS] + [place / "usr/local/bin/uv"]
    for program in programs:
        shutil.copy2(str(shutil.which(program.name)), program)
    for library in _libraries([*programs, *_interpreter(place)]):
        shutil.copy2(library, place / "usr/lib" / library.name)
    for name in filter(lambda name: Path("/", name).exists(), _FILES):
        shutil.copy2(Path("/", name), place / name)
    certificates = ssl.get_default_verify_paths().cafile
    if certificates:
        shutil.copy2(certificates, place / _CERTIFICATES.lstrip("/"))
    (place / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (place / "etc/group").write_text("root:x:0:\n")
    pip = place / "usr/local/bin/pip"
    pip.write_text(_PIP)
    pip.chmod(0o755)
    cache = subprocess.run(["uv", "cache", "dir"], check=True, capture_output=True, text=True).stdout.strip()
    Path(cache).mkdir(parents=True, exist_ok=True)
    return Root(place, {_CACHE: Path(cache)})


def _interpreter(place: Path) -> list[Path]:
    """Copy the interpreter to /usr/local; its files that name libraries."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base, local = Path(sys.base_prefix), place / "usr/local"
    program, library = local / "bin" / version, local / "lib" / version
    shutil.copy2(base / "bin" / version, program)
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(version)
    shutil.copytree(base / "lib" / version, library, ignore=_LEFT_OUT, symlinks=True)
    (library / "site-packages").mkdir()
    return [program, *(library / "lib-dynload").glob("*.so")]


def _libraries(programs: Sequence[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    found = {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed, re.MULTILINE)}
    beside = {path.parent / name for path in found for name in _LIBRARIES}
    return found | {path for path in beside if path.exists()}


def serving_url(output: IO[str]) -> str:
    """Read a server's output up to its address. Raises RuntimeError, with what it said, if it ends before."""
    said = ""
    for line in output:
        if match := re.match(r"Serving on (\S+)", line):
            return match[1]
        said += line
    raise RuntimeError(f"the server did not get ready\n{said}")


def pieces(url: str, key: str = "") -> Iterator[str]:
    """Ask for a chat; the pieces of text of its stream as they come. Raises RuntimeError if it has no end."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(_QUESTION).encode(), headers)
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                yield from filter(None, (choice["delta"].get("content") for choice in choices))
            elif line.startswith(b"data: [DONE]"):
                return
    raise RuntimeError("the stream has no end")


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.rglob('*') if file.is_file()) / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deploy.root", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="aioinfer-root-") as folder:
        root = assemble(Path(folder) / "root")
        print(f"the empty root: {_size(root.path)}; {wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
        shutil.copy2(wheel, root.path / wheel.name)
        env = ENVIRONMENT | {"PATH": f"/venv/bin:{ENVIRONMENT['PATH']}", "HOME": "/root"}
        start = time.monotonic()
        root.run(["python", "-m", "venv", "--without-pip", "/venv"], env=env)
        # pip compiles what it installs, too.
        root.run(
            ["pip", "--python", "/venv/bin/python", "install", "--compile-bytecode", f"/{wheel.name}"],
            env=env,
        )
        print(f"installed in {time.monotonic() - start:.0f} s")
        (package,) = root.path.glob("venv/lib/python*/site-packages/aioinfer")
        print(f"the package with its modules compiled: {_size(package)}")
        for which in ("first", "second"):
            start = time.monotonic()
            with root.start(["aioinfer", "serve", "--port", "0"], env=env) as server:
                assert server.stdout is not None
                try:
                    text = next(pieces(serving_url(server.stdout)))
                    seconds = time.monotonic() - start
                    print(f"{which} start, from `aioinfer serve` to the token {text!r}: {seconds:.1f} s")
                finally:
                    server.send_signal(signal.SIGTERM)
        print(root.run(["aioinfer", "doctor"], env=env))


if __name__ == "__main__":
    main()
