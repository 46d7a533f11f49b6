"""`radixlm generate`: prompts as messages, raw, from arguments and from a pipe."""

from __future__ import annotations

import io
import json
import sys
from typing import Any, ClassVar

import pytest

from radixlm.base.errors import ConfigError
from radixlm.engine.model_info import ASSETS
from radixlm.entrypoints import generate
from radixlm.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ASSETS / "radix-tiny")


class FakeEngine:
    """Answers with what it was asked."""

    seen: ClassVar[list[dict[str, Any]]] = []
    tokenizer: Any = TOKENIZER

    def __init__(self, **options: Any) -> None:
        FakeEngine.seen.clear()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None: ...

    def generate(self, stream: bool = False, **fields: Any) -> Any:
        self.seen.append(fields)
        answer = {"text": f"answer {len(self.seen)}"}
        return iter([{"text": "ans"}, answer]) if stream else answer


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(generate, "Engine", FakeEngine)
    return FakeEngine.seen


def test_a_prompt_is_a_users_message(engine: list[dict[str, Any]], capsys: Any) -> None:
    assert generate.main(["Hello you", "--max-new-tokens", "5", "--page-size", "16"]) == 0
    assert capsys.readouterr().out == "answer 1\n"
    (fields,) = engine
    text = TOKENIZER.decode(fields["input_ids"], skip_special_tokens=False)
    assert "user" in text and "Hello you" in text and text.index("Hello") > 3
    assert fields["sampling_params"]["max_new_tokens"] == 5
    assert fields["sampling_params"]["stop"] is not None


def test_raw_prompts_from_everywhere(
    engine: list[dict[str, Any]], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.main(["--raw", "--json", "--prompt", "a", "--prompt=b", "c"]) == 0
    assert [fields["prompt"] for fields in engine] == ["a", "b", "c"]
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["answer 1", "answer 2", "answer 3"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert generate.main(["--raw"]) == 0
    assert [fields["prompt"] for fields in engine] == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["x", "--temprature", "1"], "did you mean '--temperature'"),
        (["--chat-template", "nowhere", "x"], "--chat-template"),
    ],
)
def test_wrong_options_are_named(options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate.main(options)


def test_a_model_without_a_template_gets_the_text(
    engine: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(TOKENIZER), "chat_template", lambda *args, **kwargs: None)
    assert generate.main(["x"]) == 0
    assert engine[0]["prompt"] == "x"
    monkeypatch.setattr(FakeEngine, "tokenizer", None)
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        generate.main(["x"])
