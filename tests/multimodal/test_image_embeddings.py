"""Embeddings of images, and of images with texts, through /v1/embeddings and /encode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytest.importorskip("PIL")
pytest.importorskip("transformers")

import transformers

from tests.multimodal.app_server import PARTS, PLACE, Served, file_of, make_image, served, uri
from tests.multimodal.tiny import image_processor, qwen2_vl, save, tokenizer

SIZE = {"height": 28, "width": 28}
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
IMAGES = (make_image(40, 30), make_image(28, 28), make_image(30, 64))


def clip(folder: Path) -> Any:
    """A tiny CLIP with its tokenizer and image processor."""
    tok = tokenizer()
    text = {**SHAPE, "vocab_size": 400, "max_position_embeddings": 40, "eos_token_id": 256}
    text["projection_dim"] = 24
    config = transformers.CLIPConfig(
        text_config={**text, "bos_token_id": 0, "pad_token_id": 1}, projection_dim=24,
        vision_config={**SHAPE, "image_size": 28, "patch_size": 7},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    reader = image_processor("CLIP", size={"shortest_edge": 28}, crop_size=SIZE)
    reader.save_pretrained(folder)
    return model, reader


def cosine(a: Any, b: Any) -> float:
    x, y = (torch.as_tensor(np.asarray(one, np.float64)).reshape(-1) for one in (a, b))
    return float(normalize(x, dim=0) @ normalize(y, dim=0))


def vector_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.pooler_output


async def embed(server: Served, given: Any, **fields: Any) -> Any:
    answer = await server.post("/v1/embeddings", input=given, **fields)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


async def conversation(server: Served, url: str, *parts: Any, **fields: Any) -> Any:
    """The vectors of a user's message with an image, in vLLM's form."""
    content = [{"type": "image_url", "image_url": {"url": url}}, *parts]
    messages = [{"role": "user", "content": content}]
    answer = await server.post("/v1/embeddings", messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


async def native(server: Served, **fields: Any) -> Any:
    answer = await server.post("/encode", **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_clip_embeds_texts_and_images(tmp_path: Path) -> None:
    model, reader = clip(tmp_path)
    ids = [0, 9, 8, 7, 256]
    with torch.inference_mode():
        text = vector_of(model.get_text_features(input_ids=torch.tensor([ids])))[0]
        pixels = reader(images=list(IMAGES), return_tensors="pt")["pixel_values"].float()
        seen = vector_of(model.get_image_features(pixel_values=pixels))
    urls = [uri(file_of(one)) for one in IMAGES]

    async def run() -> None:
        async with served(tmp_path) as server:
            assert cosine((await embed(server, ids))[0], text) > 1 - 1e-6
            got = await embed(server, [{"image": url} for url in urls])
            for mine, theirs in zip(got, seen, strict=True):
                assert mine == pytest.approx(normalize(theirs, dim=0).tolist(), abs=1e-5)
            both = await embed(server, [{"image": urls[0]}, {"text": "a word<|end|>"}])
            assert both[0] == got[0] and len(both[1]) == len(got[0])
            assert both[1] == (await embed(server, "a word<|end|>"))[0]
            assert (await embed(server, [{"text": "padding", "image": urls[1]}]))[0] == got[1]
            assert await conversation(server, urls[1]) == [got[1]]
            short = (await embed(server, [{"image": urls[0]}], dimensions=8))[0]
            assert short == pytest.approx(normalize(seen[0][:8], dim=0).tolist(), abs=1e-5)
            assert (await native(server, image_data=urls[2]))["embedding"] == got[2]
            two = await native(
                server, text=["padding", "a word<|end|>"], image_data=[urls[2], None]
            )
            assert [one["embedding"] for one in two] == [got[2], both[1]]
            for bad, where in (
                ({"image": "nonsense"}, "input[0].image"), ({}, "input[0]"),
                ({"image": urls[0], "text": "both"}, "input[0]"),
                ({"video": urls[0]}, "input[0].video"), ({"image": uri(b"")}, "input[0].image"),
            ):  # fmt: skip
                answer = await server.post("/v1/embeddings", input=[bad])
                assert answer.status_code == 400 and where in answer.text, answer.text

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["Siglip", "Siglip2"])
@pytest.mark.filterwarnings("ignore")
def test_siglip_embeds_texts_and_images(kind: str, tmp_path: Path) -> None:
    """Texts are filled up with padding, whose last token has the vector."""
    tok, length = tokenizer(), 24
    text = {**SHAPE, "vocab_size": 400, "max_position_embeddings": length, "projection_size": 40}
    seen = {**SHAPE, "hidden_size": 40, "patch_size": 7}
    seen |= {"image_size": 28} if kind == "Siglip" else {"num_patches": 16}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=seen)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    sizes = {"size": SIZE} if kind == "Siglip" else {"patch_size": 7, "max_num_patches": 16}
    reader = image_processor(kind, **sizes)
    reader.save_pretrained(tmp_path)
    padded = tok("a word", padding="max_length", max_length=length)["input_ids"]
    assert padded[-10:] == [tok.pad_token_id] * 10
    with torch.inference_mode():
        word = vector_of(model.get_text_features(input_ids=torch.tensor([padded])))[0]
        given = reader(images=list(IMAGES), return_tensors="pt")
        wanted = vector_of(model.get_image_features(**given))

    async def run() -> None:
        async with served(tmp_path) as server:
            urls = [uri(file_of(one)) for one in IMAGES]
            got = await embed(server, [{"text": "a word"}, *({"image": url} for url in urls)])
            for mine, theirs in zip(got, (word, *wanted), strict=True):
                assert mine == pytest.approx(normalize(theirs, dim=0).tolist(), abs=1e-5)
            assert (await embed(server, "a word"))[0] == got[0]
            assert (await embed(server, padded))[0] == got[0]

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore")
def test_a_vision_language_model_gives_embeddings(tmp_path: Path) -> None:
    """As in gme: the last token of the rendered chat template, normalised."""
    tiny = qwen2_vl()
    model = save(tiny, tmp_path)
    place = tiny.placeholder

    def oracle(written: str, *images: Any) -> Tensor:
        given = tiny.processor(text=[written], images=list(images) or None, return_tensors="pt")
        given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
        with torch.inference_mode():
            found: Tensor = model.model(**given).last_hidden_state[0, -1]
        return found

    async def run() -> None:
        template = PARTS.replace(PLACE, place)
        async with served(tmp_path, template, is_embedding=True) as server:
            urls = [uri(file_of(one)) for one in IMAGES]
            given = [{"image": urls[0]}, {"image": urls[1], "text": "find"}, {"text": "find"}]
            got = [*await embed(server, given), *await embed(server, "raw")]
            wanted = (
                oracle(f"<user>{place}\n<assistant>", IMAGES[0]),
                oracle(f"<user>{place}find\n<assistant>", IMAGES[1]),
                oracle("<user>find\n<assistant>"),
                oracle("raw"),
            )
            for mine, theirs in zip(got, wanted, strict=True):
                assert cosine(mine, theirs) > 1 - 1e-5
                assert np.linalg.norm(mine) == pytest.approx(1, abs=1e-5)
            assert await embed(server, given) == got[:3]  # from the prefix cache
            one = await native(server, text=f"see {place} here", image_data=urls[2])
            assert cosine(one["embedding"], oracle(f"see {place} here", IMAGES[2])) > 1 - 1e-5
            for adds, end in ((False, ""), (True, "<assistant>")):
                [chat] = await conversation(
                    server, urls[1], {"type": "text", "text": "find"}, add_generation_prompt=adds
                )
                assert cosine(chat, oracle(f"<user>{place}find\n{end}", IMAGES[1])) > 1 - 1e-5
            answer = await server.post("/v1/embeddings", input=[{"image": "file:///etc/passwd"}])
            assert answer.status_code == 400 and "input[0].image" in answer.text

    asyncio.run(run())
