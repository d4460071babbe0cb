"""What single frameworks have beside chats: agents, pipelines, programs, and how they tell of errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import aioinfer.integrations
from aioinfer import Engine, EngineConfig, InvalidRequest, Rejected
from aioinfer.testing import Answer, FakeEngine
from tests.integrations import drivers
from tests.integrations.drivers import weather
from tests.integrations.libraries import LIBRARIES
from tests.tiers import PROGRAM, SECONDS, rest

pytestmark = rest(SECONDS)

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


# It looks at all members of its agents, of which pydantic deprecates some.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211")
async def test_llama_index_agents_call_functions() -> None:
    async with FakeEngine([CALLING, "Take an umbrella."]) as engine:
        driver = drivers.llama_index(engine)
        from llama_index.core.agent.workflow import FunctionAgent

        agent = FunctionAgent(tools=[weather], llm=driver.model, system_prompt="Be brief.")
        assert str(await agent.run("How is the weather in Rome?")) == "Take an umbrella."
        assert (engine.requests[1].messages or ())[-1]["content"] == "Rome: rain"
        await asyncio.sleep(0)


async def test_llama_index_knows_the_model_and_refuses_images() -> None:
    async with FakeEngine("Hello.") as engine:
        driver = drivers.llama_index(engine)
        from llama_index.core.llms import ChatMessage, ImageBlock

        metadata = driver.model.metadata
        assert (metadata.model_name, metadata.is_function_calling_model) == ("fake", True)
        assert metadata.context_window == engine.info.max_model_len
        image = ChatMessage(blocks=[ImageBlock(image=b"GIF89a")])
        with pytest.raises(InvalidRequest, match="messages: ImageBlock is not read"):
            await driver.model.achat([image])
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


async def test_pydantic_ai_tells_the_system_once_and_refuses_images() -> None:
    async with FakeEngine("Hello.") as engine:
        model = drivers.pydantic_ai(engine, max_tokens=50).model
        from pydantic_ai import Agent, BinaryContent

        agent = Agent(model, system_prompt="Be brief.", instructions="Be kind.")
        settings = {"extra_body": {"min_p": 0.1, "priority": 3}, "logit_bias": {"65": -5}}
        found = await agent.run("Hi", model_settings=settings)
        (request,) = engine.requests
        assert (request.messages or ())[0] == {"role": "system", "content": "Be brief.\n\nBe kind."}
        assert (request.params.min_p, request.params.logit_bias) == (0.1, {65: -5.0})
        assert request.options.priority == 3
        assert found.response.model_name == "fake"
        with pytest.raises(InvalidRequest, match="messages: UserPromptPart is not read"):
            await agent.run(["Look", BinaryContent(b"GIF89a", media_type="image/gif")])
        with pytest.raises(TypeError, match="has no argument 'min_q'"):
            await agent.run("Hi", model_settings={"extra_body": {"min_q": 1}})
