"""Unmodified client frameworks; each test runs if the framework is installed (`pip install
'radixlm[clients]'`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

MODEL = "radix-tiny"
ASK = "What is the weather in Paris?"


class Verdict(BaseModel):
    """A judgement."""

    ok: bool
    grade: int


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore warnings of the frameworks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.filterwarnings("ignore")
def test_langchain(client_url: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    core = pytest.importorskip("langchain_core.messages")
    tools = pytest.importorskip("langchain_core.tools")

    @tools.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    def make(**options: Any) -> Any:
        return openai.ChatOpenAI(
            model=MODEL, base_url=f"{client_url}/v1", api_key="x", max_retries=0, temperature=0,
            max_tokens=80, **options,
        )  # fmt: skip

    model = make(stream_usage=True)
    whole = model.invoke(ASK)
    parts = list(model.stream(ASK))
    assert "".join(part.content for part in parts) == whole.content
    assert (
        sum((p.usage_metadata or {}).get("output_tokens", 0) for p in parts)
        == (whole.usage_metadata["output_tokens"])
    )
    bound = model.bind_tools([get_weather], tool_choice="any")
    asked = [core.HumanMessage(ASK)]
    called = bound.invoke(asked)
    streamed = None
    for part in bound.stream(asked):
        streamed = part if streamed is None else streamed + part
    assert streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]
    result = get_weather.invoke(called.tool_calls[0])
    assert model.invoke([*asked, called, result]).content
    for method in ("json_schema", "function_calling"):
        judge = model.with_structured_output(Verdict, method=method)
        assert isinstance(judge.invoke("Judge."), Verdict)
    responses = make(use_responses_api=True)
    assert responses.invoke(ASK).content[0]["text"] == whole.content


@pytest.mark.filterwarnings("ignore")
def test_langchain_embeddings(vector_url: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    model = openai.OpenAIEmbeddings(
        model="default", base_url=f"{vector_url}/v1", api_key="x", check_embedding_ctx_length=False
    )
    documents = model.embed_documents(["a", "b"])
    assert documents[0] == pytest.approx(model.embed_query("a"), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_openai_agents(client_url: str, kind: str) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "sunny"

    async with AsyncOpenAI(base_url=f"{client_url}/v1", api_key="x", max_retries=0) as client:
        model = getattr(agents, kind)(model=MODEL, openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
        agent = agents.Agent(
            name="w", instructions="Use the tool.", tools=[get_weather], model=model,
            model_settings=settings,
        )  # fmt: skip
        done = await agents.Runner.run(agent, ASK, max_turns=3)
        assert asked and done.final_output
        streamed = agents.Runner.run_streamed(agent, ASK, max_turns=3)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds and streamed.final_output == done.final_output
        judge = agents.Agent(name="j", output_type=Verdict, model=model)
        judged = await agents.Runner.run(judge, "Judge.")
        assert isinstance(judged.final_output, Verdict)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_pydantic_ai(client_url: str, kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{client_url}/v1", api_key="x")
    model = getattr(models, kind)(MODEL, provider=provider)
    settings = {"temperature": 0, "max_tokens": 80}
    agent = ai.Agent(model, model_settings=settings)
    asked: list[str] = []

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "sunny"

    assert (await agent.run(ASK)).output and asked
    for output in (Verdict, ai.NativeOutput(Verdict)):
        judge = ai.Agent(model, output_type=output, model_settings=settings)
        assert isinstance((await judge.run("Judge.")).output, Verdict)


@pytest.mark.filterwarnings("ignore")
def test_smolagents(client_url: str) -> None:
    smol = pytest.importorskip("smolagents")
    model = smol.OpenAIServerModel(
        model_id=MODEL, api_base=f"{client_url}/v1", api_key="x", max_tokens=80, temperature=0
    )

    @smol.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: the city
        """
        return "sunny"

    parts = [{"type": "text", "text": ASK}]
    got = model([{"role": "user", "content": parts}], tools_to_call_from=[get_weather])
    assert got.tool_calls[0].function.name == "get_weather"
    assert model([{"role": "user", "content": "hi"}]).content


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("langchain_ollama", "ChatOllama", {"num_predict": 80}),
        ("langchain_anthropic", "ChatAnthropic", {"max_tokens": 80, "api_key": "x"}),
    ],
)
def test_langchain_of_ollama_and_anthropic(
    client_url: str, module: str, name: str, options: dict[str, Any]
) -> None:
    make = getattr(pytest.importorskip(module), name)
    tools = pytest.importorskip("langchain_core.tools")

    @tools.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    model = make(model=MODEL, base_url=client_url, temperature=0, **options)
    whole = model.invoke("What is 17 + 25?")
    first, *rest = model.stream("What is 17 + 25?")
    streamed = sum(rest, start=first)
    assert whole.text == streamed.text == "42"
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"] > 0
    (call,) = model.bind_tools([get_weather]).invoke(ASK).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert isinstance(model.with_structured_output(Verdict).invoke("Judge it."), Verdict)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_outlines(client_url: str, kind: str) -> None:
    outlines = pytest.importorskip("outlines")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{client_url}/v1", api_key="x", max_retries=0)
    model = getattr(outlines, f"from_{kind}")(client, MODEL)
    digits = model("Say a number.", outlines.regex(r"[0-9]{3}"), max_tokens=20, temperature=0)
    assert len(digits) == 3 and digits.isdecimal()
    Verdict.model_validate_json(model("Judge it.", Verdict, max_tokens=60, temperature=0))
    parts = model.stream("Judge it.", Verdict, max_tokens=60, temperature=0)
    Verdict.model_validate_json("".join(parts))
