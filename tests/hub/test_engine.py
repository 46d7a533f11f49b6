"""An engine whose model, tokenizer, draft and adapter are names on a hub."""

import json
from typing import Any

from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import resolved
from radixlm.engine.supervisor import _sendable
from radixlm.entrypoints.offline import Engine
from tests.fakes.hub import FakeHub
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
