"""Adapters of a model that is cut among ranks: the bits of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm import Engine
from radixlm.base.errors import InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.topology import Topology
from radixlm.engine.adapters import AdapterLoader
from radixlm.engine.ranks import NoPeers
from radixlm.lora.adapter import read_adapter
from radixlm.lora.registry import ADAPTER_CONFIG, ADAPTER_TENSORS, Spool
from radixlm.lora.targets import AdapterTargets
from tests.fakes.cut_model import CutModel, run_ranks
from tests.fakes.lora_adapters import write_adapter, write_folder
from tests.fakes.quick import slow_unless
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny
from tests.lora.test_experts import stacked_adapter
from tests.lora.test_run import PATTERN, Adapted

HEADS = rf"({PATTERN})|lm_head$"
LATENT = r"kv_b_proj$|q_b_proj$|o_proj$"


@pytest.mark.parametrize(
    ("tp", "shared"),
    [
        pytest.param(2, True, id="2-program", marks=pytest.mark.slow),
        pytest.param(2, False, id="2-layers"),
        pytest.param(3, True, id="3-program"),  # an uneven cut
        pytest.param(3, False, id="3-layers", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("arch", "pattern"),
    [
        ("LlamaForCausalLM", HEADS), ("Qwen2ForCausalLM", HEADS), ("Phi3ForCausalLM", HEADS),
        ("GPT2LMHeadModel", PATTERN), ("Qwen3NextForCausalLM", PATTERN),
        ("DeepseekV3ForCausalLM", LATENT),
    ],
)  # fmt: skip
def test_ranks_give_the_bits_of_one(
    arch: str, pattern: str, tp: int, shared: bool, tmp_path: Path
) -> None:
    """Plain adapters, DoRA, the output head; rows without an adapter beside them."""
    base = cached_tiny(arch)
    dora = {} if pattern == LATENT else {"use_dora": True}
    folders = [
        write_adapter(base, tmp_path / "0", 2, pattern, size=0.1),
        write_adapter(base, tmp_path / "1", 5, PATTERN, seed=1, size=0.1, **dora),
    ]
    owners = {0: 0, 1: -1, 2: 1}
    alone = Adapted(base, folders)
    alone.model.use_program = shared  # type: ignore[union-attr]
    wanted = alone.run(owners)
    cut = CutModel(base, Topology(tp=tp), shared=shared)
    ranks = [Adapted(base, folders, model=model) for model in cut.models]
    got = run_ranks([lambda r=r: r.run(owners) for r in ranks], cut.ranks)[0]
    for sequence in owners:
        assert torch.equal(got[sequence], wanted[sequence]), sequence


@pytest.mark.parametrize(
    ("tp", "ep", "shared"),
    slow_unless(
        # layers cut experts as programs do: once parts of experts, once whole ones
        lambda tp, ep, shared: shared or (tp, ep) in ((4, 2), (3, 3)),
        [
            (*sizes, shared)
            for sizes in ((2, 1), (2, 2), (3, 3), (4, 2))
            for shared in (True, False)
        ],
    ),
)
@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_adapters_of_experts(arch: str, tp: int, ep: int, shared: bool, tmp_path: Path) -> None:
    """Whole experts on each rank, or parts of all of them."""
    base = cached_tiny(arch)
    folders = [stacked_adapter(base, tmp_path / f"{seed}", seed) for seed in range(2)]
    owners = {0: 0, 1: -1, 2: 1, 3: 0}
    alone = Adapted(base, folders)
    alone.model.use_program = shared  # type: ignore[union-attr]
    wanted = alone.run(owners)
    cut = CutModel(base, Topology(tp=tp, ep=ep), shared=shared)
    ranks = [Adapted(base, folders, model=model) for model in cut.models]
    got = run_ranks([lambda r=r: r.run(owners) for r in ranks], cut.ranks)[0]
    assert all(torch.equal(got[s], wanted[s]) for s in owners)
    assert (alone.run(dict.fromkeys(owners, -1))[0] - wanted[0]).abs().max() > 0.001


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_saved_whole(tied: bool, tmp_path: Path) -> None:
    """A layer, its bias and the head in the place of the model's."""
    base = cached_tiny("Qwen2ForCausalLM", tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(1)
    first, head = "base_model.model.model.layers.1.self_attn.k_proj", "base_model.model.lm_head"
    tensors = {
        f"{first}.weight": torch.randn(32, 64, generator=generator) * 0.2,
        f"{first}.bias": torch.randn(32, generator=generator),
        f"{head}.weight": torch.randn(VOCAB, 64, generator=generator) * 0.2,
    }
    config = {"r": 4, "modules_to_save": ["k_proj", "lm_head"]}
    folder = write_folder(tmp_path / "a", config, tensors)
    owners = {0: 0, 1: -1}
    wanted = Adapted(base, [folder]).run(owners)
    cut = CutModel(base, Topology(tp=2), shared=True)
    ranks = [Adapted(base, [folder], model=model) for model in cut.models]
    got = run_ranks([lambda r=r: r.run(owners) for r in ranks], cut.ranks)[0]
    assert all(torch.equal(got[s], wanted[s]) for s in owners)
    assert (got[0] - got[1]).abs().max() > 0.01


def test_the_digest_is_that_of_the_whole_adapter(tmp_path: Path) -> None:
    base = cached_tiny("LlamaForCausalLM", tie_word_embeddings=False)
    write_adapter(base, tmp_path / "c")
    models = CutModel(base, Topology(tp=2)).models
    adapters = [read_adapter(tmp_path / "c", AdapterTargets(model)) for model in models]
    assert adapters[0].digest == adapters[1].digest


GROUPS: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2}
MOVING: dict[str, Any] = {
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 3,
    "ep_num_redundant_experts": 2,
    "ep_dispatch_algorithm": "dynamic",
}


def head_adapter(base: Path, folder: Path, seed: int) -> Path:
    """DoRA, or plain with the head and the token table."""
    if seed:
        return write_adapter(base, folder, 4, PATTERN, seed=seed, size=0.1, use_dora=True)
    return write_adapter(base, folder, 2, HEADS, size=0.1)


@pytest.mark.parametrize(
    ("arch", "make", "ranks"),
    [
        ("Qwen3MoeForCausalLM", stacked_adapter, GROUPS),
        ("Qwen3MoeForCausalLM", stacked_adapter, GROUPS | MOVING),
        ("Qwen3MoeForCausalLM", stacked_adapter, {"pp_size": 2, "tp_size": 2}),
        ("LlamaForCausalLM", head_adapter, {"pp_size": 2}),
        ("LlamaForCausalLM", head_adapter, {"pp_size": 2, "tp_size": 2}),
    ],
    ids=["groups", "moving experts", "stages of experts", "stages", "both"],
)
def test_replicas_give_the_bits_of_one_rank(
    arch: str,
    make: Callable[[Path, Path, int], Path],
    ranks: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of two adapters and of none, side by side."""
    base = cached_tiny(arch)
    folders = [f"{n}={make(base, tmp_path / n, i)}" for i, n in enumerate("ab")]
    flags = {"enable_lora": True, "lora_paths": folders, "cpu_threads": 1}
    bodies = [
        {
            "input_ids": list(range(5 + n, 30 + 3 * n)),
            "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True},
            "lora_path": ("a", "b", None)[n % 3],
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for n in range(6)
    ]

    def ask(engine: Engine) -> list[Any]:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda body: engine.generate(**body), bodies))
        names = ("input_token_logprobs", "output_token_logprobs")
        return [(one["output_ids"], *(one["meta_info"][n] for n in names)) for one in found]

    with Engine(model_path=str(base), **flags) as engine:
        wanted = ask(engine)
    with thread_engine(monkeypatch, shared=True, model_path=str(base), **flags, **ranks) as engine:
        first = ask(engine)
        assert engine.flush_cache()
        assert [first, ask(engine)] == [wanted, wanted]


def test_an_adapter_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    """Each rank compares what it reads with rank 0's digest; DoRA depends on a rank's weights."""
    base, config = cached_tiny("LlamaForCausalLM"), ServerConfig.from_kwargs(enable_lora=True)
    folder = head_adapter(base, tmp_path / "a", 1)
    models = CutModel(base, Topology(tp=2)).models
    loaders = [AdapterLoader(config, model, torch.device("cpu")) for model in models]
    args: dict[str, Any] = {"number": 0, "path": str(folder)}
    for loader in loaders:
        read = loader.commands()["load_lora_adapter"](args).result(30)()
        args.setdefault("digest", read["digest"])
    with pytest.raises(InvalidRequest, match="the files have changed"):
        loaders[0].commands()["unload_lora_adapter"](args)
        loaders[0].commands()["load_lora_adapter"](args | {"digest": "0" * 32}).result(30)()


def test_an_adapter_that_came_to_another_host_is_copied(tmp_path: Path) -> None:
    """The copy stays as long as the adapter: one that depends on base weights is read again."""
    base, config = cached_tiny("LlamaForCausalLM"), ServerConfig.from_kwargs(enable_lora=True)
    folder, asked = head_adapter(base, tmp_path / "a", 1), list[str]()
    tensors = (folder / ADAPTER_TENSORS).read_bytes()

    class OtherHost(NoPeers):
        def bring_adapter(self, folder: str) -> Spool | None:
            asked.append(folder)
            return Spool(json.loads((tmp_path / "a" / ADAPTER_CONFIG).read_text()), tensors)

    (model,) = CutModel(base, Topology()).models
    loader = AdapterLoader(config, model, torch.device("cpu"), OtherHost())
    load, unload = (loader.commands()[f"{verb}_lora_adapter"] for verb in ("load", "unload"))
    args: dict[str, Any] = {"number": 0, "path": "/of/node0", "is_sent": True}
    load(args).result(30)()
    copy = Path(loader._of_base[0])
    assert asked == ["/of/node0"] and copy.is_dir() and copy != folder
    loader.renew(model)()
    unload(args)
    assert not copy.exists()
    load({"number": 1, "path": str(folder), "is_sent": False}).result(30)()
    assert len(asked) == 1, "each host has that folder itself"
