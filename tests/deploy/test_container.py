"""The image of examples/deploy: its Dockerfile is executed in empty roots, and the container is started.

The test builds with the releases that ``uv`` has in its cache, on the interpreter that runs it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aioinfer.native.levels import fitting
from aioinfer.native.processor import choose_tiles
from tests.deploy import root
from tests.deploy.dockerfile import Image, build, instructions
from tests.ports import free_port
from tests.tiers import PROGRAM, nightly

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "examples/deploy/Dockerfile").read_text("utf-8")
KEY = "secret"
COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "zig")


def base(name: str, folder: Path) -> root.Root:
    assert name == f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"
    return root.assemble(folder)


@contextmanager
def in_memory(place: Path) -> Iterator[Path]:
    """A folder for tens of thousands of links, which a disk takes long to make and to remove."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g,mode=755", "image", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


#: kernels are compiled in an empty root, on whatever machine
_patient = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := root.missing():
        pytest.skip(reason)
    levels = fitting(choose_tiles())
    if not levels:
        pytest.skip("wheels have no kernels for this processor")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    package = f"-C levels={levels[0].name} /source[structured,gguf]"  # compiling the others takes minutes
    with in_memory(tmp_path_factory.mktemp("image")) as place:
        try:
            yield build(TEXT, ROOT, place / "stages", base, PYTHON=python, PACKAGE=package, TORCH_INDEX="")
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"{error}\n{error.output}") from error


@contextmanager
def killed(server: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        server.kill()


@_patient
@nightly(PROGRAM)
def test_the_container_serves_reports_its_health_and_stops_within_the_drain(image: Image) -> None:
    volume = image.root.path.parent / "volume"
    (directory,) = image.volumes
    shutil.copytree(image.root.path / directory.lstrip("/"), volume)
    shutil.chown(volume, image.user, image.user)
    container = root.Root(image.root.path, {**image.root.binds, directory: volume})
    env = image.env | {"AIOINFER_PORT": str(free_port()), "AIOINFER_API_KEY": KEY}
    assert image.user != 0

    def execute(*command: str) -> subprocess.Popen[str]:
        return container.start(command, env=env, user=image.user, cwd=image.cwd, read_only=True)

    unhealthy = execute(*image.health)
    unhealthy.communicate()
    assert unhealthy.returncode == 1
    with execute(*image.entrypoint, *image.command) as server, killed(server):
        assert server.stdout is not None
        url = root.serving_url(server.stdout)
        assert url == f"http://0.0.0.0:{env['AIOINFER_PORT']}"
        assert "".join(root.pieces(url, KEY)) == "17 + 25 = 42"
        assert Path(f"/proc/{server.pid}/root").resolve() == image.root.path
        status = Path(f"/proc/{server.pid}/status").read_text().split("\n")
        assert {line.split()[1] for line in status if line.startswith(("Uid:", "Gid:"))} == {str(image.user)}
        healthy = execute(*image.health)
        assert (healthy.communicate()[0], healthy.returncode) == ("", 0)
        written = execute("sh", "-c", "touch() { : > $1; }; touch cache; touch /opt/file")
        assert "/opt/file: Read-only file system" in written.communicate()[0]
        # A stream that has begun is served to its end.
        stream = root.pieces(url, KEY)
        begun = next(stream)
        server.send_signal(signal.Signals[image.stop_signal])
        assert begun + "".join(stream) == "17 + 25 = 42"
        said, _ = server.communicate()
        assert server.returncode == 0, said
    assert (volume / "cache").exists()


@_patient
@nightly(PROGRAM)
def test_the_image_has_kernels_and_no_compiler(image: Image) -> None:
    def output(command: str) -> str:
        return image.root.run(["sh", "-c", command], env=image.env, user=image.user)

    assert output(f"command -v {' '.join(COMPILERS)} || echo none") == "none\n"
    packages = {path.name for path in image.root.path.glob("opt/aioinfer/lib/python*/site-packages/*")}
    assert "aioinfer" in packages
    assert not packages & {"ziglang", "pip"}
    assert not (image.root.path / "source").exists()
    assert " of the package;" in output("aioinfer doctor tiny-chat --attention-backend native")


def test_a_health_check_asks_the_port_that_is_served() -> None:
    steps = dict(instructions(TEXT))
    assert f"AIOINFER_PORT={steps['EXPOSE']}" in steps["ENV"]
    assert "os.environ['AIOINFER_PORT'] + '/readyz'" in steps["HEALTHCHECK"]
