"""What single frameworks have beside chats: agents, pipelines, programs, and how they tell of errors."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import aioinfer.integrations
from aioinfer import Engine, EngineConfig, InvalidRequest, Rejected, WrongLoop
from aioinfer.testing import Answer, FakeEngine
from tests.integrations import drivers
from tests.integrations.drivers import weather
from tests.integrations.libraries import LENIENT, LIBRARIES
from tests.server.pictures import encoded, image_url, picture, uri
from tests.tiers import PROGRAM, SECONDS, rest

RED = picture("red")

pytestmark = [rest(SECONDS), LENIENT]

CALLING = Answer("I look.", reasoning="Rome", tool_calls=[("weather", {"city": "Rome"})])
ADAPTERS = [
    path for path in Path(aioinfer.integrations.__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "calls")
]  # fmt: skip


class Sign(BaseModel):
    """A sign."""

    name: str
    open: bool


# -- all -----------------------------------------------------------------------------------------------


@rest(PROGRAM)
def test_no_framework_is_imported_unless_its_adapter_is() -> None:
    libraries = {library.partition(".")[0] for library in LIBRARIES.values()}
    code = (
        "import sys, aioinfer.engine, aioinfer.server, aioinfer.testing, aioinfer.integrations.calls\n"
        f"print({libraries} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) < 100


def test_what_frameworks_deprecate_fails_no_test() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.warn("is old", DeprecationWarning, stacklevel=1)
    assert len(found) == 1


@pytest.mark.parametrize("make", [drivers.langchain, drivers.llama_index])
async def test_arguments_may_be_assigned_and_updated_in_copies(make: Any) -> None:
    async with FakeEngine("Hello.") as engine, FakeEngine("Bye.") as other:
        driver = make(engine, temperature=0, max_tokens=50)
        first = driver.model
        first.temperature = 0.5
        driver.model = first.model_copy(update={"temperature": 0.9, "min_p": 0.1})
        await driver.ask("Hi")
        assert (engine.requests[-1].params.temperature, engine.requests[-1].params.min_p) == (0.9, 0.1)
        driver.model = first
        await driver.ask("Hi")
        assert (engine.requests[-1].params.temperature, engine.requests[-1].params.min_p) == (0.5, 0.0)
        first.engine = other
        assert (await driver.ask("Hi")).text == "Bye."
        first.temprature = 1.5
        with pytest.raises(TypeError, match="has no argument 'temprature'"):
            await driver.ask("Hi")


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_imports_no_private_module(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = [each.module or "" for each in nodes if isinstance(each, ast.ImportFrom)]
    names += [
        part.name for each in nodes if isinstance(each, ast.Import | ast.ImportFrom) for part in each.names
    ]
    private = [name for name in names if re.search(r"(^|\.)_(?!_)", name)]
    assert private == []


# -- LangChain -----------------------------------------------------------------------------------------


async def test_langchain_parses_or_tells_why_not() -> None:
    async with FakeEngine('{"name": "Shop", "open": true}') as engine:
        model = drivers.langchain(engine).model
        typed = model.with_structured_output(Sign, include_raw=True)
        found = await typed.ainvoke("A sign")
        assert found["parsed"] == Sign(name="Shop", open=True)
        assert found["raw"].content == engine.answers
        cut = await model.with_structured_output(Sign, include_raw=True, max_tokens=2).ainvoke("A sign")
        assert cut["parsed"] is None
        assert "open" in str(cut["parsing_error"])
        plain = {**Sign.model_json_schema(), "title": "Sign"}
        pieces = [each async for each in model.with_structured_output(plain).astream("A sign")]
        assert pieces[-1] == {"name": "Shop", "open": True}
        assert len(pieces) > 1
        engine.answers = Answer(tool_calls=[("Sign", {"name": "Shop", "open": False})])
        called = model.with_structured_output(Sign, method="function_calling")
        assert (await called.ainvoke("A sign")).name is not None
        assert engine.requests[-1].params.grammar is not None


async def test_langchain_chooses_tools_and_refuses_what_it_cannot_tell() -> None:
    async with FakeEngine(CALLING) as engine:
        model = drivers.langchain(engine).model
        for choice in ("weather", "any", True, "required"):
            answer = await model.bind_tools([weather], tool_choice=choice).ainvoke("Rome?")
            assert [each["name"] for each in answer.tool_calls] == ["weather"]
            assert not answer.content
        none = await model.bind_tools([weather], tool_choice="none").ainvoke("Rome?")
        assert not none.tool_calls
        open_ = model.bind_tools([weather], strict=False)
        await open_.ainvoke("Rome?")
        assert engine.requests[-1].params.grammar is None
        with pytest.raises(InvalidRequest, match="logprobs: has no place in the answers of ChatAioInfer"):
            await model.ainvoke("Rome?", logprobs=2)


async def test_langchain_haystack_and_dspy_send_images() -> None:
    async with FakeEngine("[[ ## colour ## ]]\nred", images=True) as engine:
        langchain = drivers.langchain(engine).model
        from langchain_core.messages import HumanMessage

        block = {"type": "image", "base64": encoded(RED), "mime_type": "image/png"}
        for part in (block, image_url(uri(RED))):
            await langchain.ainvoke([HumanMessage([{"type": "text", "text": "A"}, part])])
            assert "user: A<image>\n" in engine.requests[-1].prompt
        with pytest.raises(InvalidRequest, match="must be a data URI"):
            await langchain.ainvoke([HumanMessage([image_url("https://a.b/c.png")])])

        haystack = drivers.haystack(engine).model
        from haystack.dataclasses import ChatMessage, ImageContent

        content = ImageContent(encoded(RED), mime_type="image/png")
        await haystack.run_async([ChatMessage.from_user(content_parts=["A", content])])
        assert "user: A<image>\n" in engine.requests[-1].prompt

        model = drivers.dspy(engine).model
        import dspy

        with dspy.context(lm=model):
            found = await dspy.Predict("picture: dspy.Image -> colour").acall(picture=dspy.Image(uri(RED)))
        assert found.colour == "red"
        assert "<image>" in engine.requests[-1].prompt


async def test_langchain_refuses_to_wait_for_threads_on_the_engines_loop() -> None:
    async with FakeEngine("Hello.") as engine:
        model = drivers.langchain(engine).model
        for each in (model, model.bind_tools([weather])):
            with pytest.raises(WrongLoop, match="await the asynchronous one"):
                each.batch(["a", "b"])
            with pytest.raises(WrongLoop, match="await the asynchronous one"):
                next(each.batch_as_completed(["a", "b"]))
        assert not engine.requests
        found = await asyncio.to_thread(model.batch, ["a", "b"])
        assert [each.content for each in found] == ["Hello."] * 2
        done = await asyncio.to_thread(lambda: dict(model.batch_as_completed(["a", "b"])))
        assert sorted(done) == [0, 1]


async def test_langchain_models_run_in_chains_and_batches_and_are_told_apart() -> None:
    async with FakeEngine({f"Say {number}": str(number) for number in range(5)}) as engine:
        model = drivers.langchain(engine, temperature=0).model
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate

        chain = ChatPromptTemplate.from_messages([("system", "Echo."), ("user", "Say {x}")]) | model
        found = await (chain | StrOutputParser()).abatch([{"x": x} for x in range(5)])
        assert found == [*"01234"]
        assert model.asdict() == {"model": "fake", "temperature": 0, "_type": "aioinfer"}
        assert "engine" not in model.model_dump()


# -- LlamaIndex ----------------------------------------------------------------------------------------


async def test_llama_index_agents_call_functions() -> None:
    async with FakeEngine([CALLING, "Take an umbrella."]) as engine:
        driver = drivers.llama_index(engine)
        from llama_index.core.agent.workflow import FunctionAgent

        agent = FunctionAgent(tools=[weather], llm=driver.model, system_prompt="Be brief.")
        assert str(await agent.run("How is the weather in Rome?")) == "Take an umbrella."
        assert (engine.requests[1].messages or ())[-1]["content"] == "Rome: rain"
        await asyncio.sleep(0)


@pytest.mark.parametrize("streaming", [False, True])
async def test_llama_index_agents_make_no_call_that_is_cut(streaming: bool) -> None:
    made, cut = list[str](), list[str]()

    def note(city: str = "nowhere") -> str:
        """Note a city."""
        made.append(city)
        return "noted"

    async with FakeEngine(Answer(tool_calls=[("note", {"city": "Rome"})])) as engine:
        model = drivers.llama_index(engine).model
        from llama_index.core.agent.workflow import FunctionAgent
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(note)
        for most in range(1, 100):
            model.max_tokens = most
            answer = await model.achat_with_tools([tool], "Rome")
            given = [block.tool_kwargs for block in answer.message.blocks if block.block_type == "tool_call"]
            if given and isinstance(given[0], dict):
                break
            if given:
                cut.append(given[0])
                await FunctionAgent(tools=[tool], llm=model, streaming=streaming).run("Rome")
                await asyncio.sleep(0)
    assert cut
    assert made == []


async def test_llama_index_knows_the_model_and_sends_images() -> None:
    async with FakeEngine("Hello.", images=True) as engine:
        driver = drivers.llama_index(engine)
        from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

        metadata = driver.model.metadata
        assert (metadata.model_name, metadata.is_function_calling_model) == ("fake", True)
        assert metadata.context_window == engine.info.max_model_len
        image = ChatMessage(blocks=[TextBlock(text="A"), ImageBlock(image=RED), TextBlock(text="B")])
        await driver.model.achat([image])
        assert "user: A<image>B" in engine.requests[-1].prompt
        for other in (ImageBlock(url="https://a.b/c.png"), ImageBlock(image=RED, detail="low")):
            with pytest.raises(InvalidRequest, match="messages: ImageBlock is not read"):
                await driver.model.achat([ChatMessage(blocks=[other])])
        answer = await driver.model.acomplete("Hi")
        assert answer.text == "Hello."
        assert [each.delta async for each in await driver.model.astream_complete("Hi")][-1] == ""


# -- Haystack ------------------------------------------------------------------------------------------


async def test_haystack_agents_call_tools_and_tell_what_streams() -> None:
    async with FakeEngine([CALLING, "Take an umbrella."]) as engine:
        driver = drivers.haystack(engine)
        from haystack.components.agents import Agent
        from haystack.dataclasses import ChatMessage
        from haystack.tools import create_tool_from_function

        chunks: list[Any] = []

        async def tell(chunk: Any) -> None:
            chunks.append(chunk)

        agent = Agent(chat_generator=driver.model, tools=[create_tool_from_function(weather)])
        found = await agent.run_async([ChatMessage.from_user("Rome?")], streaming_callback=tell)
    assert found["last_message"].text == "Take an umbrella."
    assert found["messages"][1].reasoning.reasoning_text == "Rome"
    ours = [each for each in chunks if each.component_info]
    starts = [(each.index, bool(each.reasoning), bool(each.tool_calls)) for each in ours if each.start]
    assert starts == [(0, True, False), (1, False, False), (2, False, True), (0, False, False)]
    assert [each.finish_reason for each in ours if each.finish_reason] == ["tool_calls", "stop"]


async def test_haystack_pipelines_run_and_are_not_written_down() -> None:
    async with FakeEngine({"Say Hello": "Hello."}) as engine:
        driver = drivers.haystack(engine)
        from haystack import Pipeline
        from haystack.components.builders import ChatPromptBuilder
        from haystack.core.errors import SerializationError
        from haystack.dataclasses import ChatMessage

        pipeline = Pipeline()
        template = [ChatMessage.from_user("Say {{ word }}")]
        pipeline.add_component("prompt", ChatPromptBuilder(template=template))
        pipeline.add_component("model", driver.model)
        pipeline.connect("prompt.prompt", "model.messages")
        found = await pipeline.run_async({"prompt": {"word": "Hello"}})
        assert found["model"]["replies"][0].text == "Hello."
        with pytest.raises(SerializationError, match="engine"):
            pipeline.to_dict()


# -- DSPy ----------------------------------------------------------------------------------------------


async def test_dspy_programs_have_the_types_of_their_signatures() -> None:
    config = EngineConfig(model="tiny-chat", threads=1, num_pages=256)
    async with Engine(config) as engine:
        driver = drivers.dspy(engine, temperature=0)
        import dspy

        with dspy.context(lm=driver.model, adapter=dspy.JSONAdapter()):
            predict = dspy.Predict("text -> name, open: bool")
            found = await predict.acall(text="A sign")
            stream = dspy.streamify(predict)
            pieces = [each async for each in stream(text="A sign")]
    assert isinstance(found.open, bool)
    assert (pieces[-1].name, pieces[-1].open) == (found.name, found.open)
    assert len(pieces) > 3


async def test_dspy_calls_tools_and_has_errors_of_its_own() -> None:
    async with FakeEngine(Answer(tool_calls=[("weather", {"city": "Rome"})])) as engine:
        driver = drivers.dspy(engine)
        import dspy
        from dspy.utils import exceptions

        fields = {
            "question": (str, dspy.InputField()),
            "tools": (list[dspy.Tool], dspy.InputField()),
            "calls": (dspy.ToolCalls, dspy.OutputField()),
        }
        adapter = dspy.ChatAdapter(use_native_function_calling=True)
        with dspy.context(lm=driver.model, adapter=adapter):
            found = await dspy.Predict(dspy.Signature(fields)).acall(
                question="Rome?", tools=[dspy.Tool(weather)]
            )
        assert [(each.name, each.args) for each in found.calls.tool_calls] == [("weather", {"city": "Rome"})]
        for ours, theirs in (
            (Rejected("the queue is full", 0.0), exceptions.LMRateLimitError),
            (InvalidRequest("prompt", "is odd"), exceptions.LMInvalidRequestError),
            (ZeroDivisionError(), exceptions.LMProviderError),
        ):
            engine.answers = ours
            with pytest.raises(theirs):
                await driver.model.acall("Hi")


# -- pydantic-ai ---------------------------------------------------------------------------------------


async def test_pydantic_ai_has_typed_outputs_by_grammar_or_by_tool() -> None:
    async with FakeEngine('{"name": "Shop", "open": true}') as engine:
        model = drivers.pydantic_ai(engine).model
        from pydantic_ai import Agent, NativeOutput, ToolOutput

        for kind in (Sign, NativeOutput(Sign)):
            assert (await Agent(model, output_type=kind).run("A sign")).output == Sign(name="Shop", open=True)
            assert engine.requests[-1].tools is None
        async with Agent(model, output_type=Sign).run_stream("A sign") as found:
            assert [each async for each in found.stream_output(debounce_by=None)][-1].name == "Shop"
        engine.answers = Answer(tool_calls=[("final_result", {"name": "Shop", "open": True})])
        found = await Agent(model, output_type=ToolOutput(Sign)).run("A sign")
        assert isinstance(found.output, Sign)
        assert engine.requests[-1].tools is not None


async def test_pydantic_ai_tells_the_system_once_and_sends_images() -> None:
    async with FakeEngine("Hello.", images=True) as engine:
        model = drivers.pydantic_ai(engine, max_tokens=50).model
        from pydantic_ai import Agent, BinaryContent, ImageUrl

        agent = Agent(model, system_prompt="Be brief.", instructions="Be kind.")
        settings = {"extra_body": {"min_p": 0.1, "priority": 3}, "logit_bias": {"65": -5}}
        found = await agent.run("Hi", model_settings=settings)
        (request,) = engine.requests
        assert (request.messages or ())[0] == {"role": "system", "content": "Be brief.\n\nBe kind."}
        assert (request.params.min_p, request.params.logit_bias) == (0.1, {65: -5.0})
        assert request.options.priority == 3
        assert found.response.model_name == "fake"
        await agent.run(["Look", BinaryContent(RED, media_type="image/png")])
        assert "user: Look<image>\n" in engine.requests[-1].prompt
        with pytest.raises(InvalidRequest, match="messages: ImageUrl is not read"):
            await agent.run(["Look", ImageUrl("https://a.b/c.png")])
        with pytest.raises(TypeError, match="has no argument 'min_q'"):
            await agent.run("Hi", model_settings={"extra_body": {"min_q": 1}})


async def test_pydantic_ai_settings_that_nothing_reads_are_refused() -> None:
    async with FakeEngine("Hello.") as engine:
        model = drivers.pydantic_ai(engine).model
        from pydantic_ai import Agent

        for name in ("temprature", "thinking", "service_tier", "citations"):
            with pytest.raises(TypeError, match=f"AioInferModel has no argument '{name}'"):
                await Agent(model).run("Hi", model_settings={name: True})  # type: ignore[misc]
        assert not engine.requests
        await Agent(model).run("Hi", model_settings={"stop": ["!"], "request_timeout": 60.0, "min_p": 0.1})
        assert (engine.requests[-1].params.stop, engine.requests[-1].params.min_p) == (("!",), 0.1)


async def test_pydantic_ai_offers_the_tools_that_are_chosen() -> None:
    async with FakeEngine([CALLING, "Take an umbrella."]) as engine:
        model = drivers.pydantic_ai(engine).model
        from pydantic_ai import Agent
        from pydantic_ai.settings import ToolOrOutput

        def other() -> str:
            """Another."""
            return ""

        agent = Agent(model, tools=[weather, other])
        await agent.run("Rome?", model_settings={"tool_choice": ToolOrOutput(["weather"])})
        assert [each["function"]["name"] for each in engine.requests[0].tools or ()] == ["weather"]
