"""/server_details: options with their reasons, and the model's bytes against torch's own reader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.fakes.http_server import ScriptedServer

import radixlm
from radixlm.config.host import HostInfo
from radixlm.config.resolve import resolve
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import read_model
from radixlm.entrypoints.http.admin.details import kind_of, layer_kinds, stored_weights

TINY = Path(radixlm.__file__).parent / "assets" / "radix-tiny"


def test_reasons_of_what_resolve_changed() -> None:
    config = ServerConfig.from_kwargs(model_path="x", chunked_prefill_size=64)
    host = HostInfo("cpu", 2)
    once = resolve(config, host, frozenset({"chunked_prefill_size"}))
    assert once.given == {"chunked_prefill_size"}
    assert once.reasons["page_size"] == ("unset", "default on cpu")
    assert "chunked_prefill_size" not in once.reasons
    again = resolve(once, host, once.given)
    assert again == once and again.reasons == once.reasons
    assert config == ServerConfig.from_kwargs(model_path="x", chunked_prefill_size=64)


async def test_the_answer(server: ScriptedServer) -> None:
    server.state.config = resolve(server.config, HostInfo("cpu", 2), frozenset({"model_path"}))
    got = (await server.client.get("/server_details")).json()
    rows = {row["name"]: row for row in got["options"]}
    assert rows["page_size"]["reason"] == "default on cpu" and not rows["page_size"]["is_given"]
    assert rows["model_path"]["is_given"] and not rows["model_path"]["is_default"]
    assert rows["host"]["is_default"] and rows["host"]["flag"] == "--host"
    assert got["model"]["stored"] is None and got["machine"]["memory_bytes"] > 1 << 20
    assert got["packages"]["fastapi"]


async def test_secrets_are_hidden(server: ScriptedServer) -> None:
    server.state.config = server.config.with_values({"api_key": "do-not-show"})
    got = await server.client.get("/server_details")
    assert "do-not-show" not in got.text
    [row] = [one for one in got.json()["options"] if one["name"] == "api_key"]
    assert row["value"] == "***"


def test_stored_weights_are_those_of_the_file() -> None:
    sizes: Counter[str] = Counter()
    with safe_open(TINY / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118: not a mapping
            tensor = file.get_tensor(name)
            sizes["bytes"] += tensor.numel() * tensor.element_size()
            sizes["parameters"] += tensor.numel()
            sizes["tensors"] += 1
    got = stored_weights(TINY)
    assert got is not None and {name: got[name] for name in sizes} == sizes
    assert sum(got["bytes_by_kind"].values()) == sum(got["bytes_by_dtype"].values()) == got["bytes"]
    assert {"embedding", "attention", "feed-forward", "norm"} <= set(got["bytes_by_kind"])


def test_no_checkpoint_and_broken_ones(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "b.safetensors").write_bytes(b"x")
    assert stored_weights(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "experts"),
        ("model.layers.3.mlp.up_proj.weight", "feed-forward"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("weird", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_layers_of_a_model() -> None:
    decoder = read_model(ServerConfig.from_kwargs(model_path=str(TINY)))[0].decoder
    [row] = layer_kinds(decoder)
    assert row["layers"] == len(decoder.blocks) and row["mixer"] == "Attention"
    assert row["heads"] and row["kv_heads"] and row["head_dim"] and row["inner"]
