"""Tiny models with image or audio input through a real server: a conversation with media continues,
and unreadable media are refused by name."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.server import RunningServer

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from PIL import Image

from tests.multimodal.tiny import gemma3, save
from tests.multimodal.tiny_audio import qwen2_audio

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}PLACE{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}<assistant>"
)


def image(seed: int) -> dict[str, Any]:
    data = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), np.uint8)
    Image.fromarray(noise).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def audio(seed: int) -> dict[str, Any]:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.random.default_rng(seed).bytes(16000))
    held = base64.b64encode(data.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": held, "format": "wav"}}


CASES = {"gemma3": (gemma3, image, audio, 4), "qwen2_audio": (qwen2_audio, audio, image, 25)}


@pytest.mark.slow  # two servers start
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # Hugging Face models of tiny configs
def test_a_conversation_continues_from_the_cache(name: str, tmp_path: Path) -> None:
    make, part, other, num_placeholders = CASES[name]
    tiny = make()
    save(tiny, tmp_path)
    template = TEMPLATE.replace("PLACE", tiny.placeholder)
    (tmp_path / "chat_template.jinja").write_text(template)
    flags = ("--enable-cache-report", "--chunked-prefill-size", "32", "--max-total-tokens", "2048")

    def turn(*media: dict[str, Any], text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}, *media]}

    with RunningServer(*flags, model=str(tmp_path)) as server:

        def ask(*messages: dict[str, Any]) -> Any:
            body = {"messages": messages, "temperature": 0, "max_tokens": 6}
            return server.post("/v1/chat/completions", **body, ignore_eos=True)

        first = turn(part(1), part(2), text="Here are two of them: ")
        answer = ask(first).json()
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        again = ask(first, said, turn(text="And now?")).json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (
            cached > 2 * num_placeholders
            and cached >= answer["usage"]["prompt_tokens"] // 16 * 16 - 16
        )
        assert ask(first).json()["choices"] == answer["choices"]  # this time from the cache
        differs = ask(turn(part(3), part(2), text="Here are two of them: ")).json()
        details = differs["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        assert details["cached_tokens"] <= 32  # the text before them
        for bad in (other(1), {"type": part(1)["type"], part(1)["type"]: {"url": "data:,x"}}):
            refused = ask(turn(bad, text="Look"))
            assert refused.status_code == 400, refused.text
            assert "messages[0].content[1]" in refused.json()["error"]["message"]
