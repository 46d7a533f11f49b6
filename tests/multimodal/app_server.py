"""A checkpoint behind the whole HTTP application, with a real engine, in this process."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import ThreadEngine, intake_tokenizer
from radixlm.engine.model_info import resolved
from radixlm.entrypoints.http.app import create_app, stop_background

PLACE = "PLACE"  # the placeholder of an image in a template
# an old template that takes one text a message; the server inserts the placeholders
TEXTS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# iterates over the parts of a message
PARTS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}PLACE{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Served:
    """The application and a client that calls it without a socket."""

    def __init__(self, app: Any, engine: ThreadEngine) -> None:
        self.app, self.engine = app, engine
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=120
        )

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        """A greedy chat completion of `max_tokens` tokens."""
        body = {"messages": messages, "temperature": 0, "ignore_eos": True, **fields}
        return await self.post("/v1/chat/completions", **body)


@asynccontextmanager
async def served(
    folder: Path, template: str | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serve the checkpoint in `folder`; `template` replaces its chat template."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    given = {
        "model_path": str(folder), "dtype": "float32", "enable_cache_report": True,
        "max_running_requests": 4, "max_total_tokens": 4096, "chunked_prefill_size": 48, **options,
    }  # fmt: skip
    config, info = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    tokenizer = intake_tokenizer(config, info)
    engine = ThreadEngine(config, info, tokenizer)
    made = Served(create_app(config, info, tokenizer, engine.intake), engine)
    failed = asyncio.Event()
    engine.intake.on_failed = lambda failure: failed.set()
    await engine.start()
    try:
        waiting = [asyncio.ensure_future(e.wait()) for e in (engine.intake.ready, failed)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        assert engine.intake.failure is None, engine.intake.failure
        yield made
    finally:
        await made.client.aclose()
        await stop_background(made.app.state.server)
        await engine.stop()


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng([seed, width]).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def part(image: Image.Image | str) -> dict[str, Any]:
    """A part of a message."""
    url = image if isinstance(image, str) else uri(file_of(image))
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    made = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return {"role": "user", "content": made}
