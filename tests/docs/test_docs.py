"""The documentation is true: snippets run, commands parse, links lead somewhere, names and settings exist."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from aioinfer.checkpoint.locate import PACKAGED
from aioinfer.cli.flags import read_settings
from aioinfer.cli.main import _parser
from aioinfer.config import EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.observe.metrics.catalogue import OWN, VLLM
from aioinfer.server import serve
from tests.docs import fields, settings
from tests.docs.pages import PAGES, ROOT, Fence, anchors, commands, fences, links, prose, read
from tests.integrations.libraries import LIBRARIES, require
from tests.observe.scrapes import read_text, values
from tests.tiers import SECONDS, rest

SHELL = {"sh", "console"}
LANGUAGES = {*SHELL, "python", "yaml", "json", "text", ""}
WITH_PYTHON = [page for page in PAGES if any(fence.language == "python" for fence in fences(page))]
WITH_COMMANDS = [page for page in PAGES if any(fence.language in SHELL for fence in fences(page))]


# -- python --------------------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_snippets_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after the other in one namespace and on one event loop."""
    monkeypatch.setenv("AIOINFER_THREADS", "1")
    if page == "docs/integrations.md":
        for adapter in LIBRARIES:
            require(adapter)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    printed = io.StringIO()
    with asyncio.Runner() as runner, contextlib.redirect_stdout(printed):
        for fence in fences(page):
            if fence.language != "python":
                continue
            tree = "\n" * (fence.line - 1) + fence.text
            code = compile(tree, str(ROOT / page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                # Without a result, so that no engine of the snippet outlives its page.
                runner.run(_awaited(code, namespace))
            else:
                exec(code, namespace)
    if page == "README.md":
        assert "\n17 + 25 = 42 stop Usage(" in printed.getvalue()


async def _awaited(code: Any, namespace: dict[str, Any]) -> None:
    await eval(code, namespace)


# -- commands ------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised instead of running a program whose arguments have been parsed."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs stop when their arguments are parsed, and take no abbreviated options."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_known(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        self.allow_abbrev = False
        return parse_known_args(self, *arguments, **options)

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {unknown}")
        raise Parsed(values)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_parse(
    page: str,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every command of a page is one whose arguments the program itself, or a check here, accepts."""
    for fence, words in _commands(page):
        program, *arguments = words
        assert program in CHECKS, f"{fence}: no check for {program}"
        try:
            CHECKS[program](arguments, monkeypatch, pytestconfig)
        except SystemExit:
            raise AssertionError(f"{fence}: {' '.join(words)}\n{capsys.readouterr().err}") from None
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{fence}: {' '.join(words)}: {error}") from error


def _commands(page: str) -> Iterator[tuple[Fence, list[str]]]:
    """Those of shell blocks, and those with options in the text, but for placeholders in capitals."""
    for fence in fences(page):
        assert fence.language in LANGUAGES, f"{fence}: {fence.language} is checked by no test"
        if fence.language in SHELL:
            yield from ((fence, words) for words in commands(fence))
    for command in re.findall(r"`((?:aioinfer|pytest|python|ruff|pip|bash) [^`]+)`", prose(page)):
        if not re.search(r" [A-Z]+\b", command) and " -" in command.replace(" -m", ""):
            fence = Fence(page, 0, "sh", command)
            yield from ((fence, words) for words in commands(fence))


def _aioinfer(arguments: list[str], *_: Any) -> None:
    try:
        _parser().parse_args(arguments)
    except Parsed as parsed:
        options = parsed.args[0]
    except SystemExit as ended:  # help
        if ended.code:
            raise
        return
    if "model_argument" in options:
        other = ReplicaConfig if "with_parent" in options else ServerConfig
        for cls in (EngineConfig, other):
            read_settings(cls, options)


def _docker(arguments: list[str], *_: Any) -> None:
    """Files that exist, and what the image's program is given."""
    assert arguments[0] in ("build", "compose", "run")
    if arguments[0] == "run":
        _aioinfer(arguments[arguments.index("aioinfer") + 1 :] or ["serve"])
    else:
        assert (ROOT / arguments[arguments.index("-f") + 1]).is_file()


def _python(arguments: list[str], monkeypatch: pytest.MonkeyPatch, config: pytest.Config) -> None:
    """A module or a file of this repository, run until it has parsed its arguments."""
    module = arguments[0] == "-m"
    name, rest = (arguments[1], arguments[2:]) if module else (arguments[0], arguments[1:])
    if name == "tests.cuda_emulation":
        # It hands everything behind -- to another program.
        program, *others = rest[rest.index("--") + 1 :]
        CHECKS[program](others, monkeypatch, config)
        return
    if name in ("asyncio", "tests.docs.fields", "tests.docs.settings", "venv"):
        assert not rest or name == "venv"
        return
    file = ROOT / name.replace(".", "/") / "__main__.py" if module else ROOT / name
    if module and not file.exists():
        file = ROOT / f"{name.replace('.', '/')}.py"
    assert file.exists()
    if not module and "argparse" not in file.read_text("utf-8"):
        assert not rest, "takes no arguments"
        return
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(Parsed):
        runpy.run_path(str(file), run_name="__main__")


def _pytest(arguments: list[str], _: Any, config: pytest.Config) -> None:
    """Known options, and paths that exist."""
    values, unknown = config._parser.parse_known_and_unknown_args(arguments)
    assert not unknown, unknown
    for path in values.file_or_dir:
        assert (ROOT / path.partition("::")[0]).exists(), path


def _pip(arguments: list[str], *_: Any) -> None:
    """Extras that exist, of this project."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert arguments[0] == "install"
    if arguments[1:] == ["torch", "--index-url", "https://download.pytorch.org/whl/cpu"]:
        return
    for word in arguments[1:]:
        if word.startswith("-"):
            assert word in ("-e", "-q", "--no-deps"), word
            continue
        name, _, extras = word.removesuffix("]").partition("[")
        packages = {package for package, _ in PACKAGED.values()}
        assert name in {".", "aioinfer", "pre-commit", *packages}, name
        for extra in filter(None, extras.split(",")):
            assert extra in project["optional-dependencies"], extra


def _bash(arguments: list[str], *_: Any) -> None:
    assert (ROOT / arguments[0]).is_file()


def _release(arguments: list[str], *_: Any) -> None:
    own = read(".ci/release")
    assert all(f'"{word}"' in own for word in arguments if word.startswith("-"))


def _sanitizer(arguments: list[str], monkeypatch: pytest.MonkeyPatch, config: pytest.Config) -> None:
    assert arguments[0] == "--tool"
    assert arguments[1] in ("memcheck", "racecheck")
    CHECKS[arguments[2]](arguments[3:], monkeypatch, config)


def _tool(*known: list[str]) -> Callable[..., None]:
    def check(arguments: list[str], *_: Any) -> None:
        assert arguments in known, f"not one of {known}"

    return check


#: by program, what its arguments have to satisfy
CHECKS: dict[str, Callable[..., None]] = {
    ".ci/release": _release,
    "aioinfer": _aioinfer,
    "bash": _bash,
    "cd": lambda arguments, *_: None,
    "compute-sanitizer": _sanitizer,
    "docker": _docker,
    "export": lambda arguments, *_: None,
    "curl": lambda arguments, *_: Request.of(arguments) and None,
    "git": lambda arguments, *_: None,
    "mypy": _tool([]),
    "pip": _pip,
    "pre-commit": _tool(["install"], ["run", "--all-files"]),
    "pytest": _pytest,
    "python": _python,
    "ruff": _tool(["check", "."], ["format", "."], ["format", "--check", "."]),
    "source": lambda arguments, *_: None,
}


# -- recipes -------------------------------------------------------------------------------------------


def test_the_recipe_for_a_model_family_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line in the registry makes the native kernels compute the checkpoint of its second step."""
    from transformers import AutoConfig

    from aioinfer import LLM, SamplingParams
    from aioinfer.model import registry
    from tests.model import checkpoints

    entry, checkpoint = (eval(f"{{{text}}}", vars(registry)) for text in _recipe("a-new-model-family"))
    (name,) = checkpoint
    monkeypatch.setitem(checkpoints.FAMILIES, name, checkpoint[name])
    oracle = checkpoints.make_checkpoint(name, tmp_path)
    prompt = list(range(3, 40))
    config = EngineConfig(model=str(tmp_path), dtype="float32", num_pages=64, page_size=8, threads=1)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert registry.own_implementation(loaded) is None
    monkeypatch.setattr(registry, "_OWN", registry._OWN | entry)
    assert registry.own_implementation(loaded) is not None
    with LLM(config) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=14), progress=False)
    assert result.token_ids == checkpoints.greedy(oracle, prompt, 14)


def test_the_recipe_for_a_policy_works() -> None:
    namespace: dict[str, Any] = {"__name__": "recipe"}
    text, _ = (fence.text for fence in fences("CONTRIBUTING.md") if fence.language == "python")
    exec(text, namespace)
    queue = namespace["ShortestPrompt"](None)
    for key, length in enumerate((9, 5, 7, 5)):
        queue.add(SimpleNamespace(key=key, place=(key, key), prompt_ids=[0] * length))
    assert [request.key for request in queue.order()] == [1, 3, 2, 0]


def test_the_recipe_for_a_filter_is_the_filter() -> None:
    _, text = (fence.text for fence in fences("CONTRIBUTING.md") if fence.language == "python")
    assert text == read("aioinfer/sampling/further_filters/top_n_sigma.py")


def _recipe(heading: str) -> list[str]:
    """The indented code blocks of a recipe, without their trailing commas."""
    text = read("CONTRIBUTING.md")
    start = next(
        match.end() for match in re.finditer(r"^## (.+)$", text, re.M)
        if match[1].lower().replace(":", "").replace(" ", "-").endswith(heading)
    )  # fmt: skip
    body = text[start:].partition("\n## ")[0]
    return re.findall(r"^   ```text\n(.*?)^   ```$", body, re.M | re.S)


# -- curl ----------------------------------------------------------------------------------------------


class Request:
    """A curl command of the documentation: only these options, only loopback."""

    def __init__(self, command: list[str], url: str) -> None:
        self.command, self.url = command, url

    @classmethod
    def of(cls, arguments: list[str]) -> Request:
        url, rest = "", list(arguments)
        while rest:
            word = rest.pop(0)
            if word in ("-H", "-d"):
                value = rest.pop(0)
                if word == "-d":
                    json.loads(value)
            elif word not in ("-N", "-s"):
                assert word.startswith("127.0.0.1:8000/"), word
                url = word
        assert url, "no address"
        return cls(arguments, url)

    def send(self, address: str) -> str:
        """The answer of the server at this address."""
        words = [address + self.url.partition("/")[2].join(("/", "")) if word == self.url else word
                 for word in self.command]  # fmt: skip
        curl = shutil.which("curl")
        assert curl is not None
        done = subprocess.run(
            [curl, "-sS", "--fail-with-body", "--max-time", "60", *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _requests() -> Iterator[Any]:
    """(the page's latest ``aioinfer serve``, a curl command) of every page."""
    for page in PAGES:
        served: tuple[str, ...] = ()
        for fence in fences(page):
            for words in commands(fence) if fence.language in SHELL else ():
                if words[:2] == ["aioinfer", "serve"] and "/" not in " ".join(words):
                    served = tuple(words[2:])
                elif words[0] == "curl":
                    yield pytest.param(served, fence, words[1:], id=f"{fence}")


async def _serve(arguments: tuple[str, ...], ready: asyncio.Future[str], stop: asyncio.Event) -> None:
    """Serve as ``aioinfer serve`` would with these arguments."""
    options = _parser().parse_args(["serve", *arguments, "--port", "0", "--threads", "1"])
    async with Engine(read_settings(EngineConfig, options)) as engine:
        await serve(engine, read_settings(ServerConfig, options), stop=stop, ready=ready.set_result)


@pytest.fixture(scope="module")
def answers() -> Iterator[Callable[[tuple[str, ...], Request], str]]:
    """``answers(arguments, request)``: the answer of a server that is started once with these arguments. The
    loop of all servers runs while one of them is asked."""
    with asyncio.Runner() as runner:
        loop, stop, servers = runner.get_loop(), asyncio.Event(), []

        async def first(ready: asyncio.Future[str], server: asyncio.Task[None]) -> str:
            await asyncio.wait([ready, server], return_when=asyncio.FIRST_COMPLETED)
            return ready.result() if ready.done() else str(server.result())  # which raises

        @cache
        def start(arguments: tuple[str, ...]) -> str:
            ready = loop.create_future()
            servers.append(loop.create_task(_serve(arguments, ready, stop)))
            return runner.run(first(ready, servers[-1]))

        yield lambda arguments, request: runner.run(asyncio.to_thread(request.send, start(arguments)))
        stop.set()
        runner.run(asyncio.wait(servers))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("served", "fence", "arguments"), list(_requests()))
def test_curl_lines_are_answered(
    answers: Callable[[tuple[str, ...], Request], str],
    served: tuple[str, ...],
    fence: Fence,
    arguments: list[str],
) -> None:
    answer = answers(served, Request.of(arguments))
    assert answer.strip(), f"{fence}: an empty answer"
    if "data: " in answer:
        assert answer.endswith("data: [DONE]\n\n") or "event: response.completed\n" in answer
        assert '"error":' not in answer.replace('"error": null', "")
    elif "/metrics" in " ".join(arguments):
        assert values(read_text(answer)), "Prometheus could not read it"
    else:
        assert "error" not in json.loads(answer)


# -- links, names, settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            relative = os.path.relpath(target, ROOT)
            assert anchor in anchors(relative), f"{page}: {link}"


@pytest.mark.parametrize("picture", [path.name for path in ROOT.glob("docs/*.svg")])
def test_pictures_are_whole_and_load_nothing(picture: str) -> None:
    text = read(f"docs/{picture}")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert not re.search(r"<script|href|url\(|@import", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which names what was
def test_paths_flags_and_metrics_in_the_text_exist(page: str) -> None:
    text = prose(page)
    paths = re.findall(r"`((?:aioinfer|bench|tests|examples|docs)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    flags = re.findall(r"`(?:aioinfer \w+ )?(--[a-z][\w-]+)(?: [^`]*)?`", text)
    assert [flag for flag in flags if flag not in _flags()] == []
    metrics = re.findall(r"`((?:aioinfer|vllm)[_:][a-z_]+(?:_total|_seconds|_ratio|_tokens|_waiting))`", text)
    known = {f"{each.name}{end}" for each in (*OWN, *VLLM) for end in ("", "_total")}
    assert [name for name in metrics if name not in known] == []


@pytest.mark.parametrize("made", [settings, fields])
def test_the_tables_of_settings_and_fields_are_those_of_the_code(made: Any) -> None:
    page = made.PAGE.read_text("utf-8")
    assert page == made.rewritten(page), f"run: python -m {made.__name__}"


@cache
def _flags() -> frozenset[str]:
    """The options of every parser of the repository, by their text in its source, and of the configs."""
    made = {
        f"--{prefix}{name.replace('_', '-')}"
        for cls in (EngineConfig, ServerConfig, ReplicaConfig)
        for name in cls.__dataclass_fields__
        for prefix in ("", "no-")
    }
    files = [*ROOT.glob("aioinfer/cli/*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("examples/*.py")]
    files += ROOT.glob("tests/**/*.py")
    source = "\n".join(file.read_text("utf-8") for file in files)
    return frozenset({*made, *re.findall(r'"(--[a-z][\w-]+)"', source)})


@rest(SECONDS)
@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_names_in_the_text_exist(page: str) -> None:
    """Class names in code marks are classes or types of the package, unless they are another project's."""
    source = "\n".join(path.read_text("utf-8") for path in Path(ROOT, "aioinfer").rglob("*.py"))
    text = prose(page)
    if page == "docs/glossary.md":
        # The last two columns of the first table and the first of the second are the words of others.
        own, _, other = text.partition("## From SGLang's words")
        own = re.sub(r"(?m)^(\|[^|]*\|[^|]*\|).*$", r"\1", own)
        text = own + re.sub(r"(?m)^\|[^|]*\|", "", other)
        for path in re.findall(r"\b(\w+/(?:\w+\.py)?)(?=[ ,;)|])", other):
            assert (ROOT / "aioinfer" / path).exists(), f"{page}: {path}"
    for name in re.findall(r"`([A-Z][a-z]\w+)`", text):
        known = hasattr(asyncio, name) or re.search(rf"\b(class {name}\b|{name}\s*=)", source)
        assert known, f"{page}: {name}"


def test_the_readme_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 150
    assert max(map(len, (line for line in lines if not line.startswith("|")))) <= 120


def test_the_stable_interface_lists_every_public_name() -> None:
    import aioinfer

    page = read("docs/stability.md")
    missing = [name for name in aioinfer.__all__ if f"`{name}`" not in page]
    assert not missing
