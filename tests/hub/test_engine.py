"""An engine whose model, tokenizer, draft and adapter are names on a hub."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.engine.located import locate_all
from radixlm.engine.model_info import ZOO, resolved
from radixlm.engine.supervisor import _sendable
from radixlm.entrypoints.offline import Engine
from tests.fakes import gguf_file
from tests.fakes.http_server import ScriptedServer
from tests.fakes.hub import FakeHub, folder_files
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.hub.conftest import TINY


def test_an_engine_by_name_answers_as_one_of_the_folder(hub: FakeHub) -> None:
    params = {"max_new_tokens": 8, "temperature": 0}
    with Engine(model_path=str(TINY), device="cpu") as engine:
        wanted = engine.generate("The sea", params)["text"]
    with Engine(model_path="org/radix-tiny", device="cpu") as engine:
        assert engine.generate("The sea", params)["text"] == wanted
        assert engine.config.model.model_path == "org/radix-tiny"
        assert engine.config.serve.served_model_name == "org/radix-tiny"


def test_a_child_process_is_told_where_things_lie(hub: FakeHub) -> None:
    config, info = resolved(ServerConfig.from_kwargs(model_path="org/radix-tiny"), frozenset())
    asked = len(hub.requests)
    sent = json.loads(json.dumps(_sendable(config, frozenset())))
    hub.repos.clear()
    child, same = resolved(ServerConfig.from_kwargs(**sent), frozenset())
    assert same.folder == info.folder and child.model.model_path == "org/radix-tiny"
    assert len(hub.requests) == asked


def test_tokenizer_draft_and_adapter_by_name(hub: FakeHub, monkeypatch: Any) -> None:
    files = hub.repos["org/radix-tiny"].files("main")
    hub.add("org/draft", files)
    hub.add("org/tokens", files)
    hub.add("org/fr", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    config, _ = resolved(
        ServerConfig.from_kwargs(
            model_path=str(TINY),
            tokenizer_path="org/tokens",
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path="org/draft",
            lora_paths=["fr=org/fr"],
        ),
        frozenset(),
    )
    assert set(config.located) == {"tokenizer_path", "speculative_draft_model_path", "org/fr"}
    asked = [path for _, path, _ in hub.requests]
    assert any("org/draft/resolve" in path and path.endswith("model.safetensors") for path in asked)
    assert not any("org/tokens" in path and path.endswith(".safetensors") for path in asked)


def test_a_gguf_file_by_its_quantization(hub: FakeHub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    tiny = cached_tiny("Qwen3ForCausalLM")
    small = gguf_file.convert(tiny, tmp_path / "m-Q8_0.gguf", "qwen3", "Q8_0", {})
    large = gguf_file.convert(tiny, tmp_path / "m-F16.gguf", "qwen3", "F16", {})
    hub.add("org/m-GGUF", {file.name: file.read_bytes() for file in (small, large)})
    config, info = resolved(ServerConfig.from_kwargs(model_path="org/m-GGUF:f16"), frozenset())
    assert config.located["model_path"].endswith("/m-F16.gguf")
    assert next(info.folder.glob("*.gguf")).read_bytes() == large.read_bytes()
    assert not hub.sent[small.name]


def test_an_adapter_by_name_while_the_engine_runs(hub: FakeHub) -> None:
    folder = ZOO / "radix-tiny-lora-upper"
    hub.add("org/upper", folder_files(folder))
    params = {"max_new_tokens": 8, "temperature": 0}
    with Engine(model_path=str(TINY), device="cpu", enable_lora=True) as engine:
        engine.load_lora_adapter("local", str(folder))
        engine.load_lora_adapter("named", "org/upper")
        texts = [
            engine.generate("What is 17 + 25?", params, lora_path=name)["text"]
            for name in ("local", "named")
        ]
        assert texts[0] == texts[1]
        with pytest.raises(InvalidRequest, match="has no such repository"):
            engine.load_lora_adapter("none", "org/none")


def test_flags_that_concern_no_download_say_so(caplog: pytest.LogCaptureFixture) -> None:
    options = {"revision": "v1", "download_dir": "/tmp/x"}
    locate_all(ServerConfig.from_kwargs(model_path=str(TINY), **options))
    assert [line.partition(" ")[0] for line in caplog.messages] == ["--revision", "--download-dir"]


def test_an_update_from_disk_asks_for_the_newest_commit(hub: FakeHub) -> None:
    files = folder_files(TINY)
    with Engine(model_path="org/radix-tiny", device="cpu") as engine:
        assert engine.update_weights_from_disk("org/radix-tiny")[0]
        hub.add("org/radix-tiny", files | {"model.safetensors": b"none"})
        is_ok, message, _ = engine.update_weights_from_disk("org/radix-tiny")
        assert not is_ok and "truncated" in message
        is_ok, message, _ = engine.update_weights_from_disk("org/none")
        assert not is_ok and "model_path org/none" in message


async def test_answers_name_what_the_user_wrote(hub: FakeHub, tmp_path: Path) -> None:
    server = ScriptedServer(TINY, {}, model_path="org/radix-tiny", tokenizer_path="org/tokens")
    state = server.state
    located = {"model_path": str(TINY), "tokenizer_path": str(TINY)}
    state.config = replace(state.config, located=located)
    for route in ("/get_model_info", "/get_server_info"):
        answer = (await server.client.get(route)).json()
        assert answer["model_path"] == "org/radix-tiny", route
        assert answer["tokenizer_path"] == "org/tokens", route
    assert (await server.client.get("/tokenizer_info")).json()["chat_template"]
