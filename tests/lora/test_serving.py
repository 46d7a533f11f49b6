"""Adapters of a running engine, through the HTTP application: chosen per request, loaded and
unloaded while others decode, apart in the prefix cache."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from safetensors.torch import load_file

import radixlm
from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import ThreadEngine, intake_tokenizer
from radixlm.engine.model_info import resolved
from radixlm.entrypoints.http.app import create_app
from radixlm.entrypoints.http.openapi.response_schemas import ANSWERS
from tests.fakes.lora_adapters import merged, write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

ARCH = "Qwen3ForCausalLM"
IDS = [[5 + (seed * 11 + i * 7) % 300 for i in range(20 + seed)] for seed in range(4)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of the base model, of different ranks."""
    root, base = tmp_path_factory.mktemp("adapters"), cached_tiny(ARCH)
    return [write_adapter(base, root / f"a{i}", 2 + 3 * i, seed=i) for i in range(3)]


def answers(model: Path, prompts: Sequence[list[int]], **fields: Any) -> list[list[int]]:
    """Tokens of a plain engine of this checkpoint."""
    with radixlm.Engine(model_path=str(model), random_seed=0) as engine:
        found = engine.generate(input_ids=list(prompts), sampling_params=GREEDY, **fields)
    return [one["output_ids"] for one in found]


@pytest.fixture(scope="module")
def wanted(
    folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[list[int]]]:
    """By adapter: the tokens of checkpoints with its weights merged."""
    base, root = cached_tiny(ARCH), tmp_path_factory.mktemp("merged")
    found: dict[str | None, list[list[int]]] = {None: answers(base, IDS)}
    for i, folder in enumerate(folders):
        found[f"a{i}"] = answers(merged(base, folder, root / f"{i}"), IDS)
    assert len({str(tokens) for tokens in found.values()}) == len(found)
    return found


class Served:
    """The application over an engine in a thread."""

    def __init__(self, client: httpx.AsyncClient, engine: ThreadEngine) -> None:
        self.client, self.engine = client, engine

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def load(self, name: str, path: Path, **more: Any) -> dict[str, Any]:
        answer = await self.post("/load_lora_adapter", lora_name=name, lora_path=str(path), **more)
        assert (answer.status_code == 200) == answer.json()["success"], answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def unload(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.post("/unload_lora_adapter", lora_name=name)).json()
        return found

    async def tokens(self, prompt: int, adapter: str | None, **fields: Any) -> list[int]:
        body = {"input_ids": IDS[prompt], "sampling_params": GREEDY, "lora_path": adapter}
        answer = await self.post("/generate", **body | fields)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["output_ids"]
        return found


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    options = {
        "model_path": str(cached_tiny(ARCH)),
        "enable_lora": True,
        "random_seed": 0,
    } | options
    config, info = resolved(ServerConfig.from_kwargs(**options), frozenset(options))
    tokenizer = intake_tokenizer(config, info)
    engine = ThreadEngine(config, info, tokenizer)
    await engine.start()
    try:
        await asyncio.wait_for(engine.intake.ready.wait(), 120)
        app = create_app(config, info, tokenizer, engine.intake)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            yield Served(client, engine)
    finally:
        await engine.stop()


async def test_a_batch_of_several_adapters(
    folders: list[Path],
    wanted: dict[str | None, list[list[int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    paths = [f"a{i}={folder}" for i, folder in enumerate(folders)]
    async with serving(lora_paths=paths, log_requests=True, enable_metrics=True) as served:
        names = [None, "a0", "a1", "a2"]
        for _ in range(2):  # computed, then from the cache
            for prompt in range(2):
                body = {"input_ids": [IDS[prompt]] * 4, "sampling_params": GREEDY}
                rows = (await served.post("/generate", lora_path=names, **body)).json()
                assert [r["output_ids"] for r in rows] == [wanted[n][prompt] for n in names]
        named = [
            (row["meta_info"].get("lora_name"), row["meta_info"].get("lora_digest", ""))
            for row in rows
        ]
        assert [name for name, _ in named] == names
        entries = served.engine.intake.adapters.entries
        assert [digest for _, digest in named] == ["", *(one.digest[:8] for one in entries)]
        assert caplog.text.count(f"'lora_name': 'a1', 'lora_digest': '{named[2][1]}'") == 4
        hits = [row["meta_info"]["cached_tokens"] for row in rows]
        assert len(set(hits)) == 1 and hits[0] > 0
        one = await served.post("/generate", lora_path="a1", **body)
        assert [r["output_ids"] for r in one.json()] == [wanted["a1"][1]] * 4
        await served.load("later", folders[0])
        metrics = (await served.client.get("/metrics")).text
        assert re.search(r'lora_requests_total\{.*lora_name="a1".*\} 8.0', metrics)
        assert re.search(r"lora_load_seconds_count\{.*\} 1.0", metrics)
        bad = await served.post("/generate", lora_path=["a1"], **body)
        assert bad.status_code == 400 and "lora_path has 1 entries for 4" in bad.text


async def test_loads_and_unloads_while_others_decode(
    folders: list[Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    async with serving() as served:
        long = {"sampling_params": GREEDY | {"max_new_tokens": 150}}
        running = [asyncio.ensure_future(served.tokens(i, None, **long)) for i in range(4)]
        for round_ in range(3):
            for i, folder in enumerate(folders):
                loaded = await served.load(f"a{i}", folder)
                assert loaded["loaded_adapters"][f"a{i}"] == str(folder)
                assert await served.tokens(round_, f"a{i}") == wanted[f"a{i}"][round_]
            for i in range(len(folders)):
                assert (await served.unload(f"a{i}"))["success"]
        for i, task in enumerate(running):
            assert (await task)[:16] == wanted[None][i]
        assert served.engine.intake.adapters.loaded == {}


async def test_the_cache_knows_contents_not_names(
    folders: list[Path], wanted: dict[str | None, list[list[int]]], tmp_path: Path
) -> None:
    folder = tmp_path / "moving"
    shutil.copytree(folders[0], folder)
    async with serving() as served:
        await served.load("x", folder)
        await served.load("same", folders[0])
        body = {"input_ids": IDS[0], "sampling_params": GREEDY}
        first = (await served.post("/generate", lora_path="x", **body)).json()
        again = (await served.post("/generate", lora_path="same", **body)).json()
        base = (await served.post("/generate", **body)).json()
        cached = [one["meta_info"]["cached_tokens"] for one in (first, again, base)]
        assert cached == [0, 16, 0] and first["output_ids"] == again["output_ids"]
        shutil.copytree(folders[1], folder, dirs_exist_ok=True)  # other content, the same name
        assert (await served.load("x", folder, load_inplace=True))["success"]
        new = (await served.post("/generate", lora_path="x", **body)).json()
        assert new["meta_info"]["cached_tokens"] == 0
        assert new["output_ids"] == wanted["a1"][0]


async def test_unloading_waits_for_users_and_refuses_new_ones(
    folders: list[Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    async with serving() as served:
        await served.load("a0", folders[0])
        long = {"sampling_params": GREEDY | {"max_new_tokens": 200}}
        running = asyncio.ensure_future(served.tokens(0, "a0", **long))
        while not served.engine.intake.requests:
            await asyncio.sleep(0)
        loads = (await served.client.get("/v1/loads?include=lora")).json()["loads"]
        assert loads == [
            {"dp_rank": 0, "lora_num_loaded": 1, "lora_num_pinned": 0, "lora_num_loading": 0,
             "lora_num_reqs": 1, "lora_num_waiting_reqs": 1},
        ]  # fmt: skip
        unloading = asyncio.ensure_future(served.unload("a0"))
        await asyncio.sleep(0)
        while "a0" in served.engine.intake.adapters:
            await asyncio.sleep(0)
        refused = await served.post("/generate", text="x", lora_path="a0")
        assert refused.status_code == 400
        assert "not loaded" in refused.text and "never been loaded" in refused.text
        # the old version serves its requests to the end, also under a name that is taken again
        await served.load("a0", folders[1])
        assert await served.tokens(1, "a0") == wanted["a1"][1]
        assert (await running)[:16] == wanted["a0"][0]
        assert (await unloading)["success"]


async def test_too_many_adapters(folders: list[Path]) -> None:
    a, b, c = folders
    async with serving(max_loaded_loras=2, max_loras_per_batch=2) as served:
        await served.load("a", a, pinned=True)
        pin = await served.load("b", b, pinned=True)
        assert "not allowed to pin all slots" in pin["error_message"]
        await served.load("b", b)
        assert set((await served.load("c", c))["loaded_adapters"]) == {"a", "c"}
        first = await served.tokens(0, "b")  # it comes back, and the other goes
        assert set(served.engine.intake.adapters.loaded) == {"a", "b"}
        assert first == await served.tokens(0, "b")


async def test_names_of_models(folders: list[Path]) -> None:
    paths = [f"{name}={folders[0]}" for name in ("fr", "größe:2")]
    async with serving(lora_paths=paths, served_model_name="base") as served:
        base, adapted = await served.tokens(0, None), await served.tokens(0, "fr")
        assert base != adapted
        for model, tokens in {
            "base": base, "fr": adapted, "base:fr": adapted, "base: fr ": adapted,
            "other:fr": adapted, "größe:2": adapted, "base:größe:2": adapted, "base:": base,
            "llama3:8b": base,
        }.items():  # fmt: skip
            sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
            body = {"model": model, "prompt": IDS[0], "return_token_ids": True, **sampling}
            answer = (await served.post("/v1/completions", **body)).json()
            assert answer["choices"][0]["token_ids"] == tokens, model
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert (await served.post("/v1/chat/completions", model="fr", **chat)).json()[
            "model"
        ] == "fr"
        for path in ("/v1/messages", "/api/chat"):
            assert (await served.post(path, model="base:fr", **chat)).status_code == 200
        lost = await served.post("/v1/chat/completions", model="base:xx", **chat)
        assert lost.status_code == 404 and lost.json()["error"]["code"] == "model_not_found"
        both = await served.post("/v1/chat/completions", model="fr", lora_path="größe:2", **chat)
        assert both.status_code == 400 and "'fr'" in both.text and "send one of them" in both.text
        models = (await served.client.get("/v1/models")).json()
        jsonschema.validate(models, ANSWERS["/v1/models"]["application/json"])
        cards = models["data"]
        assert [(c["id"], c["parent"]) for c in cards] == [
            ("base", None), ("fr", "base"), ("größe:2", "base"),
        ]  # fmt: skip
        assert (await served.client.get("/v1/models/fr")).json()["root"] == str(folders[0])
        assert (await served.client.get("/v1/models/nothing")).status_code == 404
        assert (await served.unload("fr"))["success"] and (await served.unload("größe:2"))[
            "success"
        ]
        for model in ("fr", "other:fr", "größe:2", "fr:latest"):  # not answered by the base
            gone = await served.post("/v1/chat/completions", model=model, **chat)
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"


async def test_loads_that_are_refused(folders: list[Path], tmp_path: Path) -> None:
    wide = write_adapter(cached_tiny(ARCH), tmp_path / "wide", 9)
    async with serving(
        max_lora_rank=8, lora_target_modules=["all"], served_model_name="m"
    ) as served:
        await served.load("a", folders[0])
        for name, path, words in (
            ("a", folders[1], "already exists: it is already loaded from"),
            ("m", folders[1], "is no name of an adapter"),
            (":x", folders[1], "is no name of an adapter"),
            ("w", wide, "rank 9 is above the limit of 8"),
            ("n", tmp_path / "none", "or its name on a hub"),
        ):
            answer = await served.load(name, path)
            assert not answer["success"] and words in answer["error_message"], answer
            assert answer["loaded_adapters"] == {"a": str(folders[0])}
        assert "does not exist; loaded: a" in (await served.unload("b"))["error_message"]
        assert (await served.load("w", folders[1]))["success"]


async def test_without_adapters_requests_for_them_are_refused() -> None:
    async with serving(enable_lora=False) as served:
        for path, body in {
            "/generate": {"text": "x", "lora_path": "a"},
            "/v1/completions": {"prompt": "x", "lora_path": "a"},
            "/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
        }.items():
            answer = await served.post(path, **body)
            assert answer.status_code == 400 and "--enable-lora" in answer.text


def test_a_bad_adapter_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--lora-paths x: .*no adapter_config"):
        radixlm.Engine(model_path=str(cached_tiny(ARCH)), lora_paths=[f"x={tmp_path}"])
    with pytest.raises(ConfigError, match=r"--lora-paths: .*/none is no folder"):
        radixlm.Engine(model_path=str(tmp_path), lora_paths=[f"x={tmp_path}/none"])


def test_the_offline_engine(folders: list[Path], wanted: dict[str | None, list[list[int]]]) -> None:
    with radixlm.Engine(model_path=str(cached_tiny(ARCH)), enable_lora=True) as engine:
        loaded = engine.load_lora_adapter(lora_name="a0", lora_path=str(folders[0]))
        assert loaded["loaded_adapters"] == {"a0": str(folders[0])}
        names = ["a0", None]
        rows = engine.generate(input_ids=IDS[:2], sampling_params=GREEDY, lora_path=names)
        assert [r["output_ids"] for r in rows] == [wanted["a0"][0], wanted[None][1]]
        with pytest.raises(InvalidRequest, match="not loaded"):
            engine.generate("x", lora_path="b")
        assert engine.unload_lora_adapter("a0")["loaded_adapters"] == {}

        async def again() -> list[dict[str, str]]:
            loaded = await engine.async_load_lora_adapter("b", str(folders[0]))
            unloaded = await engine.async_unload_lora_adapter("b")
            return [answer["loaded_adapters"] for answer in (loaded, unloaded)]

        assert asyncio.run(again()) == [{"b": str(folders[0])}, {}]


async def test_an_adapter_that_comes_as_tensors(
    folders: list[Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    """Its folder is there until it is unloaded; what may run code is not read."""
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    data = (folders[0] / "adapter_model.safetensors").read_bytes()
    body = {"lora_name": "x", "config_dict": config}
    path = "/load_lora_adapter_from_tensors"
    async with serving() as served:
        await served.load("a0", folders[0])
        for bad, words in (
            ({"serialized_named_tensors": "?"}, "a safetensors file in base64"),
            ({"serialized_named_tensors": "AAAA"}, "adapter_model.safetensors"),
            (packed(data) | {"load_format": "flattened_bucket"}, "since it may run code"),
            (packed(data) | {"serialized_named_tensors": ["AA==", "AAA="]}, "the same for each"),
            (packed(data) | {"added_tokens_config": {"a": 1}}, "adapters that add no tokens"),
            (packed(data) | {"config_dict": {**config, "r": 9}}, "adapter_config.json says 9"),
        ):
            refused = await served.post(path, **(body | bad))
            assert refused.status_code == 400 and words in refused.json()["error_message"]
        loaded = await served.post(path, **(body | packed(data)))
        assert loaded.json()["loaded_adapters"] == {"a0": str(folders[0]), "x": "tensors"}
        x = next(one for one in served.engine.intake.adapters.entries if one.name == "x")
        assert Path(x.path).is_dir() and x.digest == digest_of(served, "a0")
        assert await served.tokens(1, "x") == wanted["a0"][1]
        folder = Path(x.path)
        del x
        replaced = (folders[1] / "adapter_model.safetensors").read_bytes()
        other = json.loads((folders[1] / "adapter_config.json").read_text())
        again = body | {"config_dict": other, "load_inplace": True} | packed(replaced)
        assert (await served.post(path, **again)).status_code == 200
        assert await served.tokens(1, "x") == wanted["a1"][1]
        assert (await served.unload("x"))["success"]
        gc.collect()
        assert not folder.exists()


def packed(data: bytes) -> dict[str, Any]:
    return {"serialized_named_tensors": base64.b64encode(data).decode()}


def digest_of(served: Served, name: str) -> str:
    return next(one.digest for one in served.engine.intake.adapters.entries if one.name == name)


def test_an_offline_engine_takes_tensors(
    folders: list[Path], wanted: dict[str | None, list[list[int]]]
) -> None:
    tensors = load_file(folders[2] / "adapter_model.safetensors")
    config = json.loads((folders[2] / "adapter_config.json").read_text())
    options = {"model_path": str(cached_tiny(ARCH)), "enable_lora": True, "random_seed": 0}
    with radixlm.Engine(**options) as engine:
        engine.load_lora_adapter_from_tensors("t", list(tensors.items()), config)
        found = engine.generate(input_ids=IDS[0], sampling_params=GREEDY, lora_path="t")
        assert found["output_ids"] == wanted["a2"][0]


async def test_vectors_of_an_adapter(folders: list[Path], tmp_path: Path) -> None:
    """One for each prompt, in all routes, as from a checkpoint with its weights merged."""

    async def vectors(served: Served, **fields: Any) -> list[list[float]]:
        answer = await served.post("/encode", input_ids=IDS[:3], **fields)
        assert answer.status_code == 200, answer.text
        return [one["embedding"] for one in answer.json()]

    whole = merged(cached_tiny(ARCH), folders[0], tmp_path / "m")
    async with serving(model_path=str(whole), is_embedding=True) as served:
        wanted = await vectors(served)
    async with serving(is_embedding=True, lora_paths=[f"a={folders[0]}"]) as served:
        plain = await vectors(served)
        mixed = await vectors(served, lora_path=["a", None, "a"])
        for index, one in enumerate((wanted[0], plain[1], wanted[2])):
            assert max(abs(a - b) for a, b in zip(mixed[index], one, strict=True)) < 1e-4
        assert await vectors(served, lora_path="a") != plain
        for how in ({"model": "a"}, {"lora_path": "a"}):
            got = (await served.post("/v1/embeddings", input=IDS[2], **how)).json()
            assert got["data"][0]["embedding"] == mixed[2]
        for how, words in (({"lora_path": "z"}, "not loaded"), ({"lora_path": ["a"]}, "1 entries")):
            refused = await served.post("/encode", input_ids=IDS[:3], **how)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
