"""Kernels that come compiled with the package: which level a processor gets, and when none is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioinfer.native import bindings, levels, processor, wheel
from aioinfer.native import build as building
from aioinfer.native.build import BuildFailed, build
from aioinfer.native.levels import PLATFORMS, digest, fitting, here, shipped, unfit
from aioinfer.native.processor import MODELLED, PERMITTED, Tiles
from tests.native.compilers import WORKS, Compiler, left
from tests.tiers import COMPILES, PROGRAM, nightly

_patient = pytest.mark.timeout(1200)
_ROOT = Path(__file__).parents[2]
REFUSED = Tiles((), "the processor has AMX, and the system refuses it")
NEHALEM = "flags : fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"
HASWELL = f"{NEHALEM} avx avx2 bmi1 bmi2 f16c fma abm movbe"
ALDER_LAKE = f"{HASWELL} avx_vnni"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni avx512_vbmi2"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} avx_vnni amx_bf16 amx_tile amx_int8"
CORTEX_A72 = "Features : fp asimd evtstrm aes crc32"
NEOVERSE_N1 = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm asimddp"
NEOVERSE_V1 = f"{NEOVERSE_N1} sve i8mm bf16"


@pytest.mark.parametrize(
    ("system", "features", "tiles", "name"),
    [
        ("linux-x86_64", NEHALEM, REFUSED, None),
        ("linux-x86_64", HASWELL, REFUSED, "avx2"),
        ("linux-x86_64", HASWELL.replace(" fma", ""), REFUSED, None),
        ("linux-x86_64", ALDER_LAKE, REFUSED, "avx2-vnni"),
        ("linux-x86_64", SKYLAKE, REFUSED, "avx512"),
        ("linux-x86_64", ICE_LAKE, REFUSED, "avx512-vnni"),
        ("linux-x86_64", ZEN_4, REFUSED, "avx512-bf16"),
        ("linux-x86_64", SAPPHIRE_RAPIDS, REFUSED, "avx512-bf16"),
        ("linux-x86_64", SAPPHIRE_RAPIDS, PERMITTED, "amx"),
        ("linux-aarch64", CORTEX_A72, REFUSED, "neon"),
        ("linux-aarch64", NEOVERSE_N1, REFUSED, "dotprod"),
        ("linux-aarch64", NEOVERSE_V1, REFUSED, "i8mm"),
        ("darwin-arm64", "asimd asimdhp atomics asimddp", REFUSED, "dotprod"),
        ("darwin-arm64", "asimd asimdhp atomics asimddp bf16 i8mm", REFUSED, "i8mm"),
        ("linux-riscv64", "isa : rv64imafdcv", REFUSED, None),
    ],
)
def test_a_processor_gets_the_best_level_that_it_has(
    monkeypatch: pytest.MonkeyPatch, system: str, features: str, tiles: Tiles, name: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", system.partition("-")[0])
    monkeypatch.setattr("platform.machine", lambda: system.partition("-")[2])
    monkeypatch.setattr(levels, "instruction_sets", lambda: features)
    assert [level.name for level in fitting(tiles)][:1] == ([name] if name else [])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that has a file for the level of this processor, and an empty cache."""
    platform, found = here(), fitting(processor.choose_tiles())
    if platform is None or not found:
        pytest.skip("wheels have no kernels for this processor")
    monkeypatch.setattr(levels, "SHIPPED", tmp_path / "shipped")
    for name in ("AIOINFER_CXX", "AIOINFER_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    path = platform.file(found[0], digest())
    path.parent.mkdir()
    path.write_text("compiled before")
    return path


def test_a_library_of_the_package_needs_no_compiler_and_no_cache(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build() == package
    assert not (tmp_path / "cache").exists()


def test_where_the_best_level_is_missing_a_lesser_one_is_used(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an image with few levels, or where tiles are permitted that were not at the installation."""
    platform, found = here(), fitting(processor.choose_tiles())
    assert platform is not None
    lesser = package.rename(platform.file(found[-1], digest()))
    assert build() == lesser


def test_who_names_a_compiler_gets_what_it_compiles(package: Path, compiler: Compiler) -> None:
    compiler(WORKS)
    assert build() != package
    assert left() == [".so"]


def test_the_model_of_tiles_is_no_level(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_library", lambda flags, progress: Path("compiled"))
    assert build(tiles=MODELLED) == Path("compiled")
    assert build(tiles=processor.choose_tiles()) == package


def test_a_library_of_other_sources_is_not_used(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A clone that was changed since."""
    assert shipped(processor.choose_tiles()) == package
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "simd.hpp").write_text("changed")
    monkeypatch.setattr(levels, "SOURCE", tmp_path / "source")
    assert shipped(processor.choose_tiles()) is None


def test_a_processor_without_any_level_is_told_what_it_lacks(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unsettled: None
) -> None:
    monkeypatch.setattr(levels, "instruction_sets", lambda: NEHALEM)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = "the kernels that come with the package need"
    with pytest.raises(BuildFailed, match=f"no C.. compiler.*{lacking}"):
        build()
    assert bindings.native_unsupported() is not None, "torch computes"
    monkeypatch.setattr(
        levels, "instruction_sets", lambda: " ".join(map(str, levels.here().levels[-1].needs))
    )  # type: ignore[union-attr]
    assert unfit(REFUSED) == ""


def test_all_processes_have_the_same_name_for_the_same_sources() -> None:
    code = "from aioinfer.native.levels import digest; print(digest())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert names == {f"{digest()}\n"}


def test_a_wheel_is_for_a_platform_that_has_kernels() -> None:
    with pytest.raises(ValueError, match="linux-aarch64"):
        wheel.get_requires_for_build_wheel({"platform": "amiga"})
    with pytest.raises(ValueError, match="there are i8mm, dotprod, neon"):
        wheel._levels(PLATFORMS["linux-aarch64"], {"levels": "neon,avx2"})
    assert [level.name for level in wheel._levels(PLATFORMS["linux-aarch64"], {"levels": "neon"})] == ["neon"]
    for platform in PLATFORMS:
        assert any("ziglang" in each for each in wheel.get_requires_for_build_wheel({"platform": platform}))


@pytest.mark.parametrize(("script", "found"), [("exit 0", True), ("exit 1", False), (None, False)])
def test_a_clone_is_compiled_at_once_only_where_there_is_no_compiler_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, found: bool
) -> None:
    """Also where the command only says that a compiler is to be installed."""
    if here() is None:
        pytest.skip("wheels have no kernels for this platform")
    for name in ("AIOINFER_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "c++").chmod(0o755)
    assert wheel._compiler() == found
    assert any("ziglang" in each for each in wheel.get_requires_for_build_editable()) != found


def test_a_compiler_that_understands_the_sources_is_recognised() -> None:
    if shutil.which("g++") is None or os.environ.get("CXX") or os.environ.get("AIOINFER_CXX"):
        pytest.skip("this machine has no g++, or another compiler is named")
    assert wheel._compiler()


@_patient
@nightly(PROGRAM)
def test_a_wheel_has_the_libraries_of_its_platform_and_no_others(tmp_path: Path) -> None:
    """Also where one for another platform was made before, and setuptools keeps files of it."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "aioinfer"):
        (shutil.copytree if name == "aioinfer" else shutil.copy2)(_ROOT / name, tmp_path / name)
    code = """if True:
        import sys
        from aioinfer.native import wheel
        def compile(platform, levels):
            wheel.SHIPPED.mkdir()
            for level in levels:
                platform.file(level, "made").touch()
        wheel._compile = compile
        print(wheel.build_wheel("dist", {"platform": sys.argv[1]}))
    """
    own = here()
    if own is None:
        pytest.skip("wheels have no kernels for this platform")
    run: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "."}}
    run |= {"capture_output": True, "text": True, "check": True}
    for name in sorted(PLATFORMS, key=lambda each: each != own.name):
        platform = PLATFORMS[name]
        done = subprocess.run([sys.executable, "-c", code, name], **run)
        file = tmp_path / "dist" / done.stdout.split()[-1]
        assert file.name.endswith(f"-py3-none-{platform.tag}.whl")
        with zipfile.ZipFile(file) as archive:
            found = {Path(path).name for path in archive.namelist() if "/shipped/" in path}
        assert found == {platform.file(level, "made").name for level in platform.levels}
    # What this machine uses has survived the wheels of others, and is in no sdist.
    kept = {path.name for path in (tmp_path / "aioinfer" / "native" / "shipped").iterdir()}
    assert kept == {own.file(level, "made").name for level in own.levels}
    code = "from aioinfer.native import wheel; print(wheel.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", code], **run)
    with tarfile.open(tmp_path / "dist" / done.stdout.split()[-1]) as packed:
        assert not [name for name in packed.getnames() if "shipped" in name]
    assert {path.name for path in (tmp_path / "aioinfer" / "native" / "shipped").iterdir()} == kept


@_patient
@nightly(COMPILES)
def test_a_level_is_compiled_and_runs(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "SHIPPED", levels.SHIPPED)
    monkeypatch.setattr(bindings, "SHIPPED", levels.SHIPPED)
    platform, level = here(), fitting(processor.choose_tiles())[0]
    assert platform is not None
    wheel._compile(platform, [level])
    kernels = bindings.Kernels(str(build()), processor.choose_tiles())
    assert f"(level {level.name} of the package; " in kernels.instructions
    assert kernels.function("lanes") > 0


@_patient
@nightly(COMPILES)
@pytest.mark.parametrize("name", PLATFORMS)
def test_every_level_of_every_platform_is_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(levels, "SHIPPED", tmp_path)
    monkeypatch.setattr(wheel, "SHIPPED", tmp_path)
    platform = PLATFORMS[name]
    wheel._compile(platform, platform.levels)
    made = {path: path.stat().st_size for path in tmp_path.iterdir()}
    assert made.keys() == {platform.file(level, digest()) for level in platform.levels}
    assert max(made.values()) < 4 << 20
