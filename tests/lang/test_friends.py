"""DSPy and outlines on an engine, where they are installed (extra ``friends``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
from tests.lang.backends import Echo

import radixlm as sgl
from radixlm.lang.friends import DspyEngine, dspy_lm, outlines_model


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with sgl.Engine(log_level="error", cpu_threads=1) as made:
        yield made


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bo"]
    age: Literal[7, 8]


def test_outlines_makes_values_of_types(engine: Any) -> None:
    outlines = pytest.importorskip("outlines")
    model = outlines_model(engine)
    assert model("Is the sky blue?", Literal["yes", "no"]) in ("yes", "no")
    assert Person.model_validate_json(model("A person", Person, max_tokens=60))
    digits = outlines.Generator(model, outlines.types.Regex("[0-9]{3}"))
    assert digits("A number").isdigit()
    texts = model.batch(["What is 17 + 25?", "Hello!"], max_tokens=8, temperature=0)
    assert "42" in texts[0] and len(texts) == 2
    chat = outlines.inputs.Chat([{"role": "user", "content": "What is 17 + 25?"}])
    assert "".join(model.stream(chat, max_tokens=8, temperature=0)) == texts[0]


def test_dspy_asks_the_engine(engine: Any) -> None:
    dspy = pytest.importorskip("dspy")
    lm = dspy_lm(engine, temperature=0.0, max_tokens=16, cache=False)
    assert "42" in lm("What is 17 + 25?")[0]
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    request = dspy.lm15.Request(
        messages=(dspy.lm15.Message.user("Say it."),),
        system="Be short.",
        config=dspy.lm15.Config(
            max_tokens=32,
            response_format={"type": "json_schema", "schema": schema},
        ),
        model="radixlm",
    )
    response = DspyEngine(engine).complete(request)
    assert '"x"' in response.message.parts[0].text and response.usage.input_tokens > 0


def test_a_backend_without_generate_is_refused() -> None:
    pytest.importorskip("dspy")
    with pytest.raises(TypeError, match="Echo has no /generate"):
        dspy_lm(Echo())
