"""Unmodified clients that need an older `openai` package. `scripts/test-clients` makes an
environment for them (`radixlm[clients-openai2]`); elsewhere they are skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

MODEL = "radix-tiny"
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}

pytestmark = pytest.mark.filterwarnings("ignore")


class Verdict(BaseModel):
    """A judgement."""

    ok: bool
    grade: int


class Loose(BaseModel):
    """Any object that a tiny model writes in JSON mode."""

    model_config = ConfigDict(extra="allow")


def test_litellm(client_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it accesses the internet
    litellm = pytest.importorskip("litellm")
    url = f"{client_url}/v1"

    def complete(model: str, base: str = url, **more: Any) -> Any:
        body = {"messages": ASK, "max_tokens": 60, "temperature": 0, "api_key": "x"} | more
        return litellm.completion(model=f"{model}/{MODEL}", api_base=base, **body)

    whole = complete("openai").choices[0].message.content
    streamed = list(complete("openai", stream=True, stream_options={"include_usage": True}))
    assert litellm.stream_chunk_builder(streamed).choices[0].message.content == whole
    forced = {"tools": [TOOL], "tool_choice": "required"}
    call = complete("openai", **forced).choices[0].message.tool_calls[0].function
    assert call.name == "get_weather" and json.loads(call.arguments)["city"]
    parts = litellm.stream_chunk_builder(list(complete("openai", stream=True, **forced)))
    assert parts.choices[0].message.tool_calls[0].function.arguments == call.arguments
    judged = complete("openai", response_format=Verdict).choices[0].message.content
    assert Verdict.model_validate_json(judged)
    assert complete("hosted_vllm").choices[0].message.content == whole
    assert complete("anthropic", client_url).choices[0].message.content == whole
    assert complete("ollama_chat", client_url).choices[0].message.content == whole
    answer = litellm.responses(model=f"openai/{MODEL}", input="hi", api_base=url, api_key="x")
    assert answer.output
    with pytest.raises(litellm.BadRequestError):
        complete("openai", max_tokens=10**9)


def test_litellm_embeddings(vector_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    got = litellm.embedding(
        model="openai/default", input=["a", "b"], api_base=f"{vector_url}/v1", api_key="x"
    )
    assert len(got.data) == 2


@pytest.mark.parametrize(
    ("mode", "record"),
    [
        ("TOOLS", Verdict),
        ("TOOLS_STRICT", Verdict),
        ("JSON_SCHEMA", Verdict),
        ("JSON", Loose),
    ],
)
def test_instructor(client_url: str, mode: str, record: type[BaseModel]) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    with openai.OpenAI(base_url=f"{client_url}/v1", api_key="x", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        asked = [{"role": "user", "content": "Say ok."}]
        body: Any = {"model": MODEL, "messages": asked, "max_tokens": 400, "temperature": 0}
        got = client.chat.completions.create(response_model=record, max_retries=0, **body)
        assert isinstance(got, record)
        if mode == "TOOLS":
            parts = list(client.chat.completions.create_partial(response_model=record, **body))
            assert record.model_validate(parts[-1].model_dump())  # it uses another prompt


def test_llama_index(client_url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    message = pytest.importorskip("llama_index.core.llms").ChatMessage
    options: Any = {"model": MODEL, "api_base": f"{client_url}/v1", "api_key": "x"}
    options |= {"max_tokens": 30, "temperature": 0}
    chat = like.OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
    asked = [message(role="user", content=ASK[0]["content"])]
    whole = chat.chat(asked).message.content
    assert "".join(part.delta for part in chat.stream_chat(asked)) == whole
    assert like.OpenAILike(is_chat_model=False, **options).complete("The").text
