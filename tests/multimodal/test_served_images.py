"""A tiny vision-language model behind the whole HTTP application: unusual, hostile and large
inputs, and precomputed features."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from safetensors.torch import save as safetensors_of
from transformers import Qwen2VLProcessor

from radixlm.models.encoders.transformers_encoder import TransformersEncoder
from radixlm.wire.media import Media
from tests.multimodal.app_server import PARTS, PLACE, Served, make_image, part, served, uri, user
from tests.multimodal.test_image import FILES, file_of, header, noise
from tests.multimodal.tiny import image_processor, qwen2_vl, save

IMAGE = make_image(42, 42)


class Watched:
    """Wraps the encoder: counts its runs, and on demand returns one row too few."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.is_wrong = 0, False
        whole = TransformersEncoder.encode

        def encode(encoder: TransformersEncoder, media: Media) -> torch.Tensor:
            self.runs += 1
            return whole(encoder, media)[:, int(self.is_wrong) :]

        monkeypatch.setattr(TransformersEncoder, "encode", encode)


class Case:
    """A server with a tiny Qwen2-VL, its oracle and its encoder."""

    def __init__(self, server: Served, tiny: Any, model: Any, encoder: Watched) -> None:
        self.server, self.tiny, self.model, self.encoder = server, tiny, model, encoder

    async def say(self, *parts: Any, **fields: Any) -> Any:
        fields = {"max_tokens": 4, **fields}
        return await self.server.chat([user(*parts)], **fields)

    async def text(self, *parts: Any, **fields: Any) -> str:
        answer = await self.say(*parts, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def refused(self, url: Any, why: str = "") -> None:
        answer = await self.say("look ", {"type": "image_url", "image_url": {"url": url}})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "messages[0].content[1]" in error["message"] and why in error["message"]
        assert error["param"] == "messages[0].content[1]"


async def hostile(case: Case) -> None:
    for data in (b"", b"<svg/>", b"<html>", file_of(noise())[:90], header(20_000, 20_000)):
        await case.refused(uri(data))
    for url in (
        "data:image/png;base64", "data:image/png;base64,!", "file:///etc/passwd", "ftp://x/y.png",
        "http://127.0.0.1:9/x.png", "http://localhost/x", "/etc/passwd", "x",
    ):  # fmt: skip
        await case.refused(url)
    await case.refused(uri(file_of(noise().resize((4000, 5)))), "aspect ratio")


async def named(case: Case) -> None:
    """Errors name the client's field on routes whose bodies become chats."""
    say, bad = {"type": "text", "text": "look"}, {"type": "url", "url": "ftp://x/y.png"}
    image = {"type": "image", "source": bad}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [say, image]}
    coded = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    items = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "ftp://"}]
    output = {"type": "function_call_output", "call_id": "c", "output": items}
    for path, name, content, where in (
        ("responses", "input", [{"role": "user", "content": items}], "[0].content[1].image_url"),
        ("responses", "input", [output], "[0].output[1].image_url"),
        ("messages", "messages", [user(say, image)], "[0].content[1].source.url"),
        ("messages", "messages", [user(image | {"source": coded})], "[0].content[0].source.data"),
        ("messages", "messages", [user(result)], "[0].content[0].content[1].source.url"),
    ):
        answer = await case.server.post(f"/v1/{path}", **{name: content}, max_tokens=4)
        error = answer.json()["error"]
        assert error["param"] == f"{name}{where}" and f"{name}{where}" in error["message"]


async def seen_in_a_result(case: Case) -> None:
    """An image in a tool result of Anthropic's is read as one in a tool message of a chat."""
    source = {"type": "base64", "media_type": "image/png", "data": uri(file_of(IMAGE))[22:]}
    blocks = [{"type": "text", "text": "here "}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks, "is_error": True}
    body = {"messages": [user(result)], "max_tokens": 4, "temperature": 0}
    got = (await case.server.post("/v1/messages", **body)).json()
    said = [{"type": "text", "text": "Error: here "}, part(uri(file_of(IMAGE)))]
    want = await case.server.chat([{"role": "tool", "content": said}], max_tokens=4)
    assert got["content"][0]["text"] == want.json()["choices"][0]["message"]["content"]
    assert got["usage"]["input_tokens"] == want.json()["usage"]["prompt_tokens"]


async def odd(case: Case) -> None:
    for data in (*FILES, file_of(noise("CMYK"), "JPEG"), file_of(noise().crop((0, 0, 1, 1)))):
        assert await case.text(part(uri(data)), "tell")
    plain = await case.text(part(uri(file_of(noise()))), "tell")
    assert plain == await case.text(part(uri(file_of(noise(), "BMP"), "text/html")), "tell")


async def broken(case: Case) -> None:
    """What a library raises inside of its processor is no text for a client."""

    def call(self: Any, **arguments: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2VLProcessor, "__call__", call)
        for count, why in ((1, "cannot read them"), (3, "3 placeholders")):
            answer = await case.server.post(
                "/generate", text=case.tiny.placeholder * count, image_data=uri(file_of(noise()))
            )
            assert answer.status_code == 400 and why in answer.text, answer.text
            assert "mat1" not in answer.text


async def much(case: Case) -> None:
    """Sixteen times the same new image."""
    before, one = case.encoder.runs, part(make_image(56, 42, seed=5))
    texts = await asyncio.gather(*(case.text(one, f"say {i}") for i in range(16)))
    assert case.encoder.runs == before + 1
    assert texts[3] == await case.text(one, "say 3")


async def too_long(case: Case) -> None:
    answer = await case.say(*(part(make_image(112, 112, seed=i)) for i in range(40)), "tell")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "of them of images" in error["message"]


async def cancelled(case: Case) -> None:
    want = await case.text(part(IMAGE), "go on", max_tokens=8)
    server = case.server
    task = asyncio.ensure_future(case.say(part(IMAGE), "go on", max_tokens=600, rid="gone"))
    while "gone" not in server.engine.intake.requests:
        await asyncio.sleep(0)
    assert (await server.post("/abort_request", rid="gone")).status_code == 200
    answer = await task
    assert answer.status_code != 200 or answer.json()["choices"][0]["finish_reason"] == "abort"
    task = asyncio.ensure_future(
        case.say(part(make_image(70, 70)), "go", max_tokens=600, rid="left")
    )
    while "left" not in server.engine.intake.requests:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not server.engine.intake.requests
    assert await case.text(part(IMAGE), "go on", max_tokens=8) == want


async def wrong_rows(case: Case) -> None:
    """A failing encoder ends its own request only, and its result is not shared."""
    fresh = part(make_image(42, 42, seed=9))
    facts = case.server.engine.intake.engine_facts  # a new object after a restart of the engine
    case.encoder.is_wrong = True
    bad, other = await asyncio.gather(case.say("look ", fresh), case.say("only a text"))
    case.encoder.is_wrong = False
    assert bad.status_code == 500 and "rows of image for" in bad.text
    assert other.status_code == 200
    assert case.server.engine.intake.engine_facts is facts
    answer = await case.say("look ", fresh)
    details = answer.json()["usage"]["prompt_tokens_details"]
    # a text before may share the words in front of the image
    assert answer.status_code == 200 and details["cached_tokens"] <= len("<user>look ")


def text_of(*words: str) -> str:
    return "<user>" + "".join(words) + "\n<assistant>"


def npy(array: Any, **options: Any) -> str:
    data = io.BytesIO()
    np.save(data, np.asarray(array), **options)
    return base64.b64encode(data.getvalue()).decode()


async def features(case: Case) -> None:
    """The same answer whoever runs processor and encoder."""
    want = await case.text(part(IMAGE), "tell", max_tokens=6)
    place, processor = case.tiny.placeholder, case.tiny.processor
    made = processor(text=[text_of(place, "tell")], images=[IMAGE], return_tensors="pt")
    ids, grid = made["input_ids"][0].tolist(), made["image_grid_thw"]
    with torch.no_grad():
        rows = case.model.model.visual(made["pixel_values"].float(), grid_thw=grid)
    rows = rows.pooler_output if hasattr(rows, "pooler_output") else rows
    whole = {k: npy(v) for k, v in made.items() if k != "attention_mask"}
    packed = base64.b64encode(safetensors_of({"feature": rows.contiguous()})).decode()
    embedded = {"format": "precomputed_embedding", "image_grid_thw": grid.tolist()}
    pixels = {"pixel_values": npy(made["pixel_values"]), "image_grid_thw": grid.tolist()}
    for given in (
        {**whole, "format": "processor_output"},
        {**pixels, "modality": "IMAGE"},
        {**embedded, "feature": rows.tolist()},
        {**embedded, "feature": packed},
        {"precomputed_embeddings": npy(rows), "image_grid_thw": npy(grid), "modality": "IMAGE"},
    ):
        for prompt in ({"input_ids": ids}, {"text": text_of(place, "tell")}):
            params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
            answer = await case.server.post(
                "/generate", **prompt, image_data=[given], sampling_params=params
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == want
            assert answer.json()["meta_info"]["prompt_tokens"] == len(ids)
        held = {"type": "image_url", "image_url": given}
        assert want == await case.text(held, "tell", max_tokens=6)
    raw = await case.server.post(
        "/generate", input_ids=case.tiny.processor.tokenizer(text_of(place, "tell"))["input_ids"],
        image_data=uri(file_of(IMAGE)), sampling_params=params,
    )  # fmt: skip
    assert raw.json()["text"] == want


async def bad_features(case: Case) -> None:
    rows = np.zeros((9, 64), np.float32)
    good = {"format": "precomputed_embedding", "image_grid_thw": [[1, 6, 6]], "feature": npy(rows)}
    pixels = {"pixel_values": npy(np.zeros((36, 294), np.float32)), "image_grid_thw": [[1, 6, 6]]}
    for change in (
        {"feature": npy(np.zeros((9, 63), np.float32))}, {"feature": npy(rows[:8])},
        {"feature": npy(rows * np.nan)}, {"feature": None}, {"feature": [[1.0], [2.0, 3.0]]},
        {"feature": npy(np.array([{}], object), allow_pickle=True)}, {"feature": "gASVAAAA"},
        {"feature": "not base64!"}, {"format": "pickle"}, {"feature": []}, {"feature": {"a": 1}},
        {"image_grid_thw": [[1, 6, 1 << 40]]}, {"image_grid_thw": [[1, 6, 8]]},
        {"image_grid_thw": None}, {"image_grid_thw": [[1.5, 6, 6]]},
        {"format": "processor_output", "feature": None},
        {"format": "processor_output", "feature": None, **pixels, "image_grid_thw": [[1, 6, 8]]},
        {"format": "processor_output", "feature": None, **pixels, "image_grid_thw": [[-1, -6, 6]]},
        {"format": "processor_output", "feature": None, "pixel_values": "cA=="},
    ):  # fmt: skip
        answer = await case.server.post(
            "/generate", text=text_of(case.tiny.placeholder, "x"), image_data=[{**good, **change}]
        )
        assert answer.status_code == 400, (change, answer.text)
        assert "image_data" in answer.json()["error"]["message"]
    answer = await case.server.post("/generate", input_ids=[1 << 40], image_data=[good])
    assert answer.status_code == 400
    mixed = await case.server.post(
        "/generate", text=case.tiny.placeholder * 2, image_data=[good, uri(file_of(IMAGE))]
    )
    assert mixed.status_code == 400 and "either images or features" in mixed.text
    misfit = {**pixels, "format": "processor_output"}
    misfit["pixel_values"] = npy(np.zeros((36, 5), np.float32))
    answer = await case.server.post(
        "/generate",
        text=case.tiny.placeholder,
        image_data=misfit,
        sampling_params={"max_new_tokens": 1},
    )
    assert answer.status_code == 400 and "pixel_values [36, 5]" in answer.text
    assert "shape" not in answer.text, "no words of torch"


async def options(case: Case) -> None:
    """mm_processor_kwargs bound the pixels as in a processor that is made with them."""
    picture, few = make_image(112, 84, seed=9), 42 * 42
    whole = await case.text(part(picture), "tell")
    body: dict[str, Any] = {
        "text": case.tiny.placeholder + "tell",
        "image_data": uri(file_of(picture)),
    }
    body["sampling_params"] = {"max_new_tokens": 4, "temperature": 0}
    counts = {}
    for most in (None, 112 * 84, few):
        given = {"min_pixels": 28 * 28, "max_pixels": most} if most else None
        answer = await case.server.post("/generate", **body, mm_processor_kwargs=given)
        counts[most] = answer.json()["meta_info"]["prompt_tokens"]
    assert counts[few] < counts[112 * 84] == counts[None]
    size = {"shortest_edge": 28 * 28, "longest_edge": few}
    bounded = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size
    )
    grids = [
        r(images=[picture])["image_grid_thw"]
        for r in (case.tiny.processor.image_processor, bounded)
    ]
    merged = [int(np.prod(grid)) // 4 for grid in grids]
    assert counts[None] - counts[few] == merged[0] - merged[1]
    small = {"max_pixels": few, "min_pixels": 28 * 28}
    assert (await case.say(part(picture), "tell", mm_processor_kwargs=small)).status_code == 200
    assert await case.text(part(picture), "tell") == whole
    for bad in ({"max_pixels": 0}, {"size": {"height": 9}}, {"max_pixels": 1 << 40}, {"x": 1}):
        answer = await case.say(part(picture), "tell", mm_processor_kwargs=bad)
        assert answer.status_code == 400 and "mm_processor_kwargs" in answer.text


CASES: tuple[Callable[[Case], Awaitable[None]], ...] = (
    hostile, named, seen_in_a_result, odd, broken, much, too_long, cancelled, wrong_rows,
    features, bad_features, options,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_images_through_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for all cases, because its start takes longer than they do."""
    tiny = qwen2_vl()
    model = save(tiny, tmp_path)
    encoder = Watched(monkeypatch)

    async def run() -> None:
        async with served(tmp_path, PARTS.replace(PLACE, tiny.placeholder)) as server:
            for case in CASES:
                await case(Case(server, tiny, model, encoder))
            assert (await server.engine.intake.control("flush_cache")).ok  # no request runs

    asyncio.run(run())
