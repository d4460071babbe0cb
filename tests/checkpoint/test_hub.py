"""Models of a hub on loopback: what is downloaded, what is not, and how it goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from aioinfer.checkpoint import fetching
from aioinfer.checkpoint.hub import HubModel, Progress, cached_models, wanted_files
from aioinfer.checkpoint.hub import download as download_by_process
from aioinfer.checkpoint.locate import bundled_models, locate, model_name
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.checkpoint.fake_hub import FakeHub, Repository, contents_of, fake_hub
from tests.tiers import SECONDS, nightly, rest

NAME = "org/tiny"
ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the bundled model, and an empty cache."""
    with fake_hub() as found:
        # In the process that downloads, and in this one, where the library has read them already.
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.setenv(name, "0")
        files = contents_of(EngineConfig().model_path)
        other = {**files, "generation_config.json": b'{"top_k": 7}'}
        found.repositories[NAME] = Repository({"main": files, "v2": other})
        yield found


@pytest.fixture
def here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The same hub, from which this process downloads: another one takes seconds to start."""

    def download(model: HubModel, allowed: bool, progress: Progress | None = None) -> Path:
        if not allowed:
            return download_by_process(model, allowed, progress)
        with fetching.Output(os.open(os.devnull, os.O_WRONLY)) as output:
            try:
                return fetching.fetch(model, output)
            except Exception as error:
                raise ConfigError(" ".join(fetching._explained(model, error).split())) from error

    monkeypatch.setattr("aioinfer.checkpoint.locate.download", download)
    return hub


def test_names_of_models() -> None:
    assert HubModel.parse("org/name") == HubModel("org/name")
    assert HubModel.parse("org/name@v1.0") == HubModel("org/name", None, "v1.0")
    assert HubModel.parse("org/name:Q4_K_M@refs/pr/1") == HubModel("org/name", "Q4_K_M", "refs/pr/1")
    wrong = [
        "name", "/org/name", "a/b/c", "./org/name", "../org", "org/", "org/name:", "org/na me", "~/x",
    ]  # fmt: skip
    for text in wrong:
        assert HubModel.parse(text) is None, text
    assert str(HubModel("org/name", "Q4", "v1")) == "org/name:Q4@v1"
    assert model_name("org/name:Q4@v1") == "org/name"
    assert model_name("/models/some.gguf") == "some"
    assert model_name("tiny-chat") == "tiny-chat"


def test_of_a_repository_only_what_is_read_is_wanted() -> None:
    small = [
        "1_Head/config.json", "1_Pooling/config.json", "chat_template.jinja", "config.json",
        "config_sentence_transformers.json", "generation_config.json", "modules.json",
        "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    other = [
        "README.md", "pytorch_model.bin", "onnx/model.onnx", "original/params.json", "a/b/config.json",
    ]  # fmt: skip
    assert wanted_files([*other, WEIGHTS, *small], HubModel(NAME)) == [*small, WEIGHTS]
    # The index says which shards.
    index = "model.safetensors.index.json"
    sharded = ["config.json", "a-1-of-1.safetensors", index]
    assert wanted_files(sharded, HubModel(NAME)) == ["config.json", index]
    outside = ["config.json", WEIGHTS, "tokenizer/../../x.json", "../config.json"]
    assert wanted_files(outside, HubModel(NAME)) == ["config.json", WEIGHTS]


def test_of_several_gguf_files_one_is_named() -> None:
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m.gguf", "README.md"]
    assert wanted_files(names, HubModel(NAME, "q8_0")) == ["m-Q8_0.gguf"]
    assert wanted_files(names[1:], HubModel(NAME)) == ["m-Q8_0.gguf"]
    with pytest.raises(ConfigError, match=r"several.*m-Q4_K_M\.gguf"):
        wanted_files(names, HubModel(NAME))
    with pytest.raises(ConfigError, match=r"neither config\.json with safetensors nor a GGUF"):
        wanted_files(["pytorch_model.bin", "config.json"], HubModel(NAME))
    larger = ["m-Q6_K.gguf", "m-Q6_K_L.gguf", "m-BF16.gguf"]
    assert wanted_files(larger, HubModel(NAME, "Q6_K")) == ["m-Q6_K.gguf"]
    assert wanted_files(larger, HubModel(NAME, "F16")) == ["m-BF16.gguf"]
    with pytest.raises(ConfigError, match="neither"):
        wanted_files(larger, HubModel(NAME, "F16"), loosely=False)
    parts = [f"m-Q4_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert wanted_files([*parts, "m-Q8_0.gguf"], HubModel(NAME, "Q4_0")) == parts
    with pytest.raises(ConfigError, match="several"):
        wanted_files([*parts, "m-Q8_0.gguf"], HubModel(NAME))


@rest(SECONDS)
def test_a_model_is_downloaded_once_and_then_never_asked_for(hub: FakeHub) -> None:
    hub.repositories[NAME].revisions["main"]["pytorch_model.bin"] = b"x" * 100
    seen: list[tuple[str, int, int]] = []
    path = locate(NAME, fetch=True, progress=lambda *state: seen.append(state))
    assert {file.name for file in path.iterdir()} == {
        file.name for file in EngineConfig().model_path.iterdir()
    }
    assert (path / WEIGHTS).read_bytes() == (EngineConfig().model_path / WEIGHTS).read_bytes()
    stage, done, total = seen[-1]
    assert (stage, done) == ("download", total)
    assert total == sum(file.stat().st_size for file in path.iterdir())
    hub.requests.clear()
    assert locate(NAME) == locate(NAME, fetch=True) == path
    assert hub.requests == []
    assert cached_models() == {NAME: path}


@rest(SECONDS)
async def test_an_engine_downloads_its_model(hub: FakeHub) -> None:
    stages: list[str] = []
    engine = Engine(EngineConfig(model=NAME, download=True, num_pages=64, threads=1))
    await engine.start(lambda stage, *_: stages.append(stage))
    try:
        result = await engine.generate("Hi", SamplingParams(max_tokens=3))
        assert result.usage.completion_tokens <= 3
        assert engine.config.model == engine.config.model_name == NAME
    finally:
        await engine.aclose()
    assert stages[-1] != "download"
    with LLM(EngineConfig(model=NAME, num_pages=64, threads=1)) as llm:
        assert llm.tokenizer is not None


@rest(SECONDS)
def test_a_revision_is_another_model(here: FakeHub) -> None:
    assert json.loads((locate(f"{NAME}@v2", fetch=True) / "generation_config.json").read_text()) == {
        "top_k": 7
    }
    assert locate(NAME, fetch=True) != locate(f"{NAME}@v2")
    with pytest.raises(ConfigError, match=r"org/tiny has no revision v3"):
        locate(f"{NAME}@v3", fetch=True)


@nightly(SECONDS)
def test_a_connection_that_breaks_is_taken_up_where_it_broke(here: FakeHub) -> None:
    # The library takes up multiples of 10 MB.
    weights = random.Random(1).randbytes(24 << 20)
    here.repositories[NAME].revisions["main"][WEIGHTS] = weights
    here.cuts = [22 << 20]
    path = locate(NAME, fetch=True)
    assert (path / WEIGHTS).read_bytes() == weights
    ranges = [wanted for _, _, wanted in here.asked(WEIGHTS) if wanted]
    assert any(int(wanted.removeprefix("bytes=").rstrip("-")) >= 20_000_000 for wanted in ranges)


@rest(SECONDS)
def test_what_has_arrived_is_not_downloaded_again(here: FakeHub) -> None:
    """The weights come last."""
    here.repositories[NAME].lost = {WEIGHTS}
    with pytest.raises(ConfigError, match="missing"):
        locate(NAME, fetch=True)
    with pytest.raises(ConfigError, match="neither a directory nor in the hub's local cache"):
        locate(NAME)
    here.repositories[NAME].lost = set()
    here.requests.clear()
    locate(NAME, fetch=True)
    gets = {path.rpartition("/")[2] for method, path, _ in here.asked("/resolve/") if method == "GET"}
    assert gets - {"chat_template.jinja"} == {WEIGHTS}


@rest(SECONDS)
def test_shards_are_those_that_the_index_names(here: FakeHub) -> None:
    files = dict(here.repositories[NAME].revisions["main"])
    files |= {"first.safetensors": files.pop(WEIGHTS), "other-00001-of-00001.safetensors": b"x"}
    for named in (["first.safetensors"], ["first.safetensors", "second.safetensors"]):
        index = json.dumps({"weight_map": dict(zip("ab", named, strict=False))}).encode()
        repository = Repository({"main": {**files, "model.safetensors.index.json": index}})
        here.repositories[f"org/sharded-{len(named)}"] = repository
        path = locate(f"org/sharded-{len(named)}", fetch=True)
        assert {file.name for file in path.glob("*.safetensors")} == {"first.safetensors"}
    with pytest.raises(ConfigError, match=r"names second\.safetensors, which is missing"):
        LLM(EngineConfig(model=str(path)))


@rest(SECONDS)
def test_a_snapshot_without_a_tokenizer_is_completed(here: FakeHub) -> None:
    """As far as that is possible: other programs download weights alone."""
    path = locate(NAME, fetch=True)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    assert locate(NAME) == path
    repository = here.repositories.pop(NAME)
    assert locate(NAME, fetch=True) == path
    here.repositories[NAME] = repository
    assert (locate(NAME, fetch=True) / "tokenizer.json").is_file()


@rest(SECONDS)
def test_a_gguf_file_that_another_program_downloaded_is_found(here: FakeHub) -> None:
    """Beside files that it left out, which its listing of the repository names."""
    files = {"config.json": b"{}", "m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF."}
    here.repositories["org/some-gguf"] = Repository({"main": files})
    path = locate("org/some-gguf:Q4_0", fetch=True)
    assert path.name == "m-Q4_0.gguf"
    entry = {"size": 4, "blob_id": "0", "lfs_sha256": None, "lfs_size": None, "xet_hash": None}
    listings = path.parents[2] / "trees"
    listings.mkdir()
    (listings / f"{path.parent.name}.json").write_text(json.dumps(dict.fromkeys(files, entry)))
    assert locate("org/some-gguf:Q4_0") == path
    with pytest.raises(ConfigError, match="neither a directory nor in"):
        locate("org/some-gguf:Q8_0")


@rest(SECONDS)
def test_what_a_killed_process_left_is_removed(here: FakeHub) -> None:
    path = locate(NAME, fetch=True)
    blob = (path / WEIGHTS).resolve()
    (path / WEIGHTS).unlink()
    blob.rename(blob.with_name(f"{blob.name}.0123abcd.incomplete"))
    locate(NAME, fetch=True)
    assert not list(blob.parent.glob("*.incomplete"))


@rest(SECONDS)
def test_a_wrong_checksum_removes_the_file(here: FakeHub) -> None:
    here.repositories[NAME].checksums[WEIGHTS] = "0" * 64
    with pytest.raises(ConfigError, match=r"model\.safetensors of org/tiny arrived damaged"):
        locate(NAME, fetch=True)
    here.repositories[NAME].checksums.clear()
    assert (locate(NAME, fetch=True) / WEIGHTS).is_file()


@rest(SECONDS)
def test_errors_say_what_to_do(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Downloads are not allowed here.*'hf download org/tiny'"):
        locate(NAME)
    assert hub.requests == []
    hub.repositories[NAME].gated = True
    with pytest.raises(ConfigError, match=r"is gated: accept its conditions at .*/org/tiny, and log in"):
        locate(NAME, fetch=True)
    with pytest.raises(ConfigError, match=r"has no model org/absent, or it is private"):
        locate("org/absent", fetch=True)
    with pytest.raises(ConfigError, match=r"there is no directory or file absent.*tiny-chat"):
        locate("absent", fetch=True)
    hub.repositories[NAME].gated = False
    disk = namedtuple("disk", "total used free")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: disk(10, 9, 1))
    read, write = os.pipe()
    message = r"org/tiny takes 0\.0 GiB.* HF_HOME"
    with os.fdopen(read), fetching.Output(write) as output, pytest.raises(ConfigError, match=message):
        fetching.fetch(HubModel(NAME), output)


@rest(SECONDS)
def test_without_a_network_the_cache_is_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = locate(NAME, fetch=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate(NAME, fetch=True) == path
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids to download it: run 'hf download org/new"):
        locate("org/new@v1", fetch=True)


@rest(SECONDS)
def test_a_hub_that_cannot_be_reached(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 cannot be reached.*'hf download org/tiny'"):
        locate(NAME, fetch=True)


@rest(SECONDS)
@pytest.mark.parametrize("ignored", [False, True])
async def test_a_start_that_downloads_can_be_cancelled(
    hub: FakeHub, tmp_path: Path, ignored: bool, request: pytest.FixtureRequest
) -> None:
    """Also where interrupts are ignored, as in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    hub.stall = 1 << 20
    engine = Engine(EngineConfig(model=NAME, download=True, num_pages=64, threads=1))
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(hub.stalling.wait, 60)
    starting.cancel()
    # The hub stands still until the end of the test: nothing waits for it.
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert engine.state is EngineState.CLOSED
    assert not any("download" in thread.name for thread in threading.enumerate())
    assert not await asyncio.to_thread(lambda: list(tmp_path.rglob("*.incomplete")))
    hub.stall = None
    hub.released.set()
    await engine.start()
    await engine.aclose()


@nightly(SECONDS)
def test_two_processes_download_at_once(hub: FakeHub, tmp_path: Path) -> None:
    script = f"from aioinfer.checkpoint.locate import locate; print(locate({NAME!r}, fetch=True))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_OFFLINE", None)
    environment.pop("TRANSFORMERS_OFFLINE", None)
    two: list[Any] = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate(timeout=240)[0].strip() for process in two}
    assert [process.returncode for process in two] == [0, 0]
    (path,) = map(Path, paths)
    assert (path / WEIGHTS).read_bytes() == (EngineConfig().model_path / WEIGHTS).read_bytes()


@nightly(SECONDS)
def test_modules_in_the_working_directory_are_not_imported(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "queue", "huggingface_hub"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert locate(NAME, fetch=True).is_dir()


@rest(SECONDS)
def test_a_directory_comes_before_a_name_on_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate(NAME, fetch=True) == Path(NAME)
    assert all(locate(name).is_dir() for name in bundled_models())
    assert hub.requests == []
