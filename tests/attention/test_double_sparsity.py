"""Double sparsity: the C++ kernels against the written definition, and tokens of an engine."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.paged_step import make_batch, new_rows
from tests.fakes.attention_case import Case
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm import Engine
from radixlm.arch.hf import describe
from radixlm.attention.double_sparsity import (
    DoubleSparsity,
    attend_sparse,
    chosen_tokens,
    heavy_channels,
    load_sparsity,
    sparse_step,
)
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.config.execute import ExecuteConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import read_model
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.kv import DTYPES, INT4
from radixlm.models.kv_groups import own_kv_heads
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

CPU = torch.device("cpu")
GROUP = KvGroup(0, "full", (0, 3), kv_heads=2, head_dim=20, v_dim=12)
SITE = AttentionSite(1, 0, heads=6, kv_heads=2, head_dim=20, v_dim=12, scale=0.3)
WINDOW = replace(GROUP, name="window", window=16)
HEADS = dict.fromkeys(GROUP.layers, (2, 0, 2))
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
needs_cpu = pytest.mark.skipif(not cpu.available, reason=cpu.reason)


def _sparsity(tokens: int, threshold: int, width: int = 5) -> DoubleSparsity:
    seeded = torch.Generator().manual_seed(width)
    channels = torch.stack([torch.randperm(20, generator=seeded)[:width] for _ in range(2)]).int()
    return DoubleSparsity({0: channels, 3: channels}, tokens, threshold)


def _backend(name: str, case: Case, sparsity: DoubleSparsity) -> tuple[Any, ForwardBatch]:
    """A backend that has the tokens before the case's step, whose sequences are all output."""
    kernels = bind("cpu", {"all": "reference"})
    group = replace(GROUP, head_dim=case.k[0].shape[2], v_dim=case.v[0].shape[2])
    backend = make_backend(name, (group,), kernels, CPU, sparsity=sparsity)
    size, counts = case.page_size, [-(-len(k) // case.page_size) for k in case.k]
    pool = backend.make_pool(group, sum(counts), size, case.cache_dtype)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        pages = range(first, first + count)
        table[row, :count] = torch.tensor(pages)
        whole = [torch.zeros(count * size, 2, x.shape[2]) for x in (case.k[row], case.v[row])]
        for to, rows in zip(whole, (case.k[row], case.v[row]), strict=True):
            to[: len(rows) - len(case.q[row])] = rows[: len(rows) - len(case.q[row])]
        pool.write(SITE.layer, list(pages), *whole)
        first += count
    batch = make_batch(case, table, backend)
    batch.prompt_len_S = torch.zeros(len(counts), dtype=torch.int64)
    return backend, batch


def _run(name: str, case: Case, sparsity: DoubleSparsity, prompt: int = 0) -> torch.Tensor:
    backend, batch = _backend(name, case, sparsity)
    assert batch.prompt_len_S is not None
    batch.prompt_len_S += prompt
    backend.begin(batch)
    site = replace(SITE, head_dim=case.k[0].shape[2], v_dim=case.v[0].shape[2])
    return backend.run(*new_rows(case, site, torch.float32), site)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, INT4], ids=str)
def test_triton_equals_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode and three output tokens, two of them sparse; rows take turns in little memory."""
    case = Case.random(SITE, [(1, 130), (3, 60)], 16, 7, cache_dtype=dtype)
    monkeypatch.setattr("radixlm.attention.triton_sparse._SCORES", 2500)
    ours, theirs = (_run(name, case, _sparsity(40, 62)) for name in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_triton
def test_triton_refuses_layers_with_sinks_in_any_step() -> None:
    case = Case.random(SITE, [(1, 0)], 16, 1)
    backend, batch = _backend("triton", case, _sparsity(4, 0))
    backend.begin(batch)
    with pytest.raises(ConfigError, match="with sinks; torch_native has"):
        backend.run(*new_rows(case, SITE, torch.float32), replace(SITE, sinks=torch.ones(6)))


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4, derandomize=True, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 150)), min_size=1, max_size=3),
    tokens=st.integers(1, 90),
    width=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_kernels_equal_the_definition(
    dtype: torch.dtype, shapes: list[tuple[int, int]], tokens: int, width: int, seed: int
) -> None:
    case = Case.random(SITE, shapes, 16, seed, cache_dtype=dtype)
    sparsity = _sparsity(tokens, 30, width)
    ours, theirs = (_run(name, case, sparsity) for name in ("cpu", "torch_native"))
    rtol, atol = (0.0, 1e-2) if cpu.isa in ("amx", "avx512bf16") else (1e-4, 1e-5)
    if dtype == INT4:  # dense rows have queries of 8 bits
        rtol, atol = 0.0, 3e-2
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@needs_cpu
def test_more_than_a_split_of_chosen_tokens() -> None:
    case = Case.random(SITE, [(1, 1500)], 16, 3)
    ours, theirs = (_run(name, case, _sparsity(700, 0)) for name in ("cpu", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("is_uneven", [False, True])
def test_candidates_of_a_long_sequence(is_uneven: bool, dtype: torch.dtype) -> None:
    """Uneven: the best tokens are those that are sampled first, so that too few others follow."""
    case = Case.random(SITE, [(1, 2600), (2, 700)], 16, 3, cache_dtype=dtype)
    if is_uneven:
        for k in case.k:
            k[torch.arange(len(k)) % 256 < 16] *= 10
    ours, theirs = (_run(name, case, _sparsity(40, 0)) for name in ("cpu", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_of_equal_scores_the_earlier_token_is_chosen() -> None:
    q, k = torch.randn(6, 20), torch.randn(1, 2, 20).expand(9, 2, 20)
    channels = torch.arange(4).int().expand(2, 4)
    assert chosen_tokens(q, k, channels, 3).tolist() == [[True] * 3 + [False] * 6] * 2


@needs_cpu
def test_kernels_choose_the_earlier_of_equal_tokens() -> None:
    case = Case.random(SITE, [(1, 99)], 16, 3)
    case.k[0][:] = case.k[0][:1]
    ours, theirs = (_run(name, case, _sparsity(7, 0)) for name in ("cpu", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_heads_of_a_group_share_what_either_likes_best() -> None:
    """In units of their own largest label: a head with small numbers counts as much."""
    q, k = torch.zeros(2, 4), torch.zeros(4, 1, 4)
    q[0, 0], q[1, 1] = 1.0, 0.01
    k[1, 0, 0], k[2, 0, 1], k[3, 0, 2] = 1.0, 1.0, 9.0
    channels = torch.arange(2).int()[None]
    assert chosen_tokens(q, k, channels, 2).tolist() == [[False, True, True, False]]


def test_all_channels_and_all_tokens_are_dense_attention() -> None:
    q, k, v = torch.randn(6, 20), torch.randn(50, 2, 20), torch.randn(50, 2, 12)
    channels = torch.arange(20).int().expand(2, 20)
    out = attend_sparse(q, k, v, channels, 50, SITE)
    weights = (q.view(2, 3, 20) @ k.permute(1, 2, 0) * SITE.scale).softmax(-1)
    torch.testing.assert_close(out, (weights @ v.transpose(0, 1)).view(6, 12))


@needs_cpu
def test_bits_do_not_depend_on_the_rest_of_the_step() -> None:
    sparsity = _sparsity(40, 60)
    case = Case.random(SITE, [(1, 130), (3, 90), (2, 5), (1, 700)], 16, 7)
    together, first = _run("cpu", case, sparsity), 0
    for row, q in enumerate(case.q):
        one = Case([q], [case.k[row]], [case.v[row]], 16, case.seed, case.cache_dtype)
        assert torch.equal(_run("cpu", one, sparsity), together[first : first + len(q)])
        first += len(q)


@pytest.mark.parametrize("name", ["torch_native", pytest.param("cpu", marks=needs_cpu)])
def test_prompts_and_short_sequences_are_dense(name: str) -> None:
    case = Case.random(SITE, [(4, 96)], 16, 1)
    dense = _run(name, case, _sparsity(100, 0))
    assert torch.equal(_run(name, case, _sparsity(10, 101)), dense)
    assert torch.equal(_run(name, case, _sparsity(10, 0), prompt=100), dense)
    mixed, sparse = (_run(name, case, _sparsity(10, 0), prompt=one) for one in (98, 0))
    assert torch.equal(mixed[:2], dense[:2])
    assert not torch.equal(mixed[2:], dense[2:])
    assert not torch.equal(sparse[:2], dense[:2])


def test_the_rows_of_a_step() -> None:
    case = Case.random(SITE, [(1, 9), (3, 10), (2, 30), (4, 4)], 16, 1)
    _, batch = _backend("torch_native", case, _sparsity(5, 12))
    batch.prompt_len_S = torch.tensor([0, 0, 31, 0])
    step = sparse_step(batch, _sparsity(5, 12))
    assert step is not None
    assert step.rows.tolist() == [[2, 1, 12], [3, 1, 13], [5, 2, 32]]
    assert step.is_sparse.tolist() == [0, 0, 0, 0]
    assert step.max_len == 32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("cpu", torch.bfloat16, marks=needs_cpu),
        pytest.param("cpu", torch.int8, marks=needs_cpu),
        pytest.param("cpu", INT4, marks=needs_cpu),
        pytest.param("triton", torch.int8, marks=needs_triton),
    ],
)
def test_labels_move_with_pages(name: str, dtype: torch.dtype) -> None:
    case = Case.random(SITE, [(1, 95)], 16, 2, cache_dtype=dtype)
    sparsity = _sparsity(9, 0)
    backend, batch = _backend(name, case, sparsity)
    pool = backend.pools[0]
    backend.begin(batch)
    rows = new_rows(case, SITE, torch.float32)
    wanted = backend.run(*rows, SITE)
    assert pool.nbytes_per_page * pool.num_pages == sum(t.nbytes for t in pool.tensors)
    assert backend.page_nbytes(GROUP, 16, dtype) == pool.nbytes_per_page
    k, v = pool.read(SITE.layer, [0, 1])
    pool.copy_pages([2, 3, 4, 5], [5, 4, 3, 2])
    pool.write(SITE.layer, [1, 0], k, v)
    table = batch.page_table_GSP[0]
    table[0] = torch.tensor([1, 0, 5, 4, 3, 2], dtype=torch.int32)
    batch.store_GT = (torch.tensor([2 * 16 + 15]),)
    backend.begin(batch)
    assert torch.equal(backend.run(*rows, SITE), wanted)


def _listed(heads: int, kind: str = "qk") -> dict[str, Any]:
    lists = [[(3 * head + i) % 20 for i in range(20)] for head in range(heads)]
    return {f"model.layers.{layer}.self_attn.{kind}_proj": lists for layer in (0, 3)}


def test_lists_by_kv_head_and_by_query_head() -> None:
    by_kv = heavy_channels(_listed(2), 3, GROUP, ("f", "qk", 4))
    assert by_kv.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    by_query = heavy_channels(_listed(4), 3, GROUP, ("f", "qk", 4))
    assert by_query[0].tolist() == [3, 4, 5, 6]  # best together in lists that begin at 0 and at 3


def test_a_rank_has_the_lists_of_its_heads(tmp_path: Path) -> None:
    (tmp_path / "channels.json").write_text(json.dumps(_listed(4)))
    config = ExecuteConfig(
        enable_double_sparsity=True,
        ds_channel_config_path=str(tmp_path / "channels.json"),
        ds_heavy_channel_num=4,
    )
    sparsity = load_sparsity(config, [GROUP], dict.fromkeys((0, 3), (4, 2, 4)))
    assert sparsity is not None
    assert sparsity.channels[3].tolist() == [[6, 7, 8, 9], [9, 10, 11, 12]]


def test_layers_that_do_not_see_all_tokens_need_no_list(tmp_path: Path) -> None:
    """They may be in a group of some that do."""
    path = tmp_path / "channels.json"
    path.write_text(json.dumps({"model.layers.3.self_attn.qk_proj": [[5, 6], [8, 7]]}))
    config = ExecuteConfig(
        enable_double_sparsity=True, ds_channel_config_path=str(path), ds_heavy_channel_num=2
    )
    decoder = describe(json.loads((cached_tiny("Llama4ForCausalLM") / "config.json").read_text()))
    heads = own_kv_heads(decoder)
    assert heads == {3: (2, 0, 2)}, "the others have chunks of tokens"
    sparsity = load_sparsity(config, [GROUP], heads)
    assert sparsity is not None
    assert sparsity.channels[3].tolist() == [[5, 6], [8, 7]]
    with pytest.raises(ConfigError, match="no layer"):
        load_sparsity(config, [GROUP], {})
    stage = load_sparsity(config, [replace(WINDOW, layers=(0, 1))], heads)
    assert stage is not None, "layer 3 is another rank's"
    assert (stage.channels, stage.digest) == ({}, sparsity.digest)
    assert stage.width(WINDOW) == stage.width(replace(WINDOW, layers=())) == 0


@pytest.mark.parametrize(
    ("arch", "full"), [("MiniMaxM3VLForCausalLM", [0]), ("DeepseekV32ForCausalLM", [])]
)
def test_layers_with_an_index_of_their_own_stay_as_they_are(arch: str, full: list[int]) -> None:
    decoder = describe(json.loads((cached_tiny(arch) / "config.json").read_text()))
    assert list(own_kv_heads(decoder)) == full


@pytest.mark.parametrize(
    ("listed", "more", "message"),
    [
        (None, {}, "No such file"),
        ([], {}, "JSON object"),
        ({}, {}, r"no 'model\.layers\.0\.self_attn\.qk_proj'"),
        (_listed(3), {}, "2 KV heads"),
        (_listed(2), {"ds_heavy_channel_num": 21}, "--ds-heavy-channel-num 21"),
        (_listed(2), {"ds_heavy_channel_type": "k"}, "--ds-heavy-channel-type"),
        ({"model.layers.0.self_attn.qk_proj": [[1], [1, 2]]}, {}, "equal length"),
        ({"model.layers.0.self_attn.qk_proj": [[20] * 8] * 2}, {}, "0 to 19"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, listed: Any, more: dict[str, Any], message: str
) -> None:
    path = tmp_path / "channels.json"
    if listed is not None:
        path.write_text(json.dumps(listed))
    fields: dict[str, Any] = {"ds_heavy_channel_num": 8, **more}
    config = ExecuteConfig(enable_double_sparsity=True, ds_channel_config_path=str(path), **fields)
    with pytest.raises(ConfigError, match=message):
        load_sparsity(config, [GROUP], HEADS)


def test_what_the_option_needs() -> None:
    with pytest.raises(ConfigError, match="--ds-channel-config-path FILE"):
        load_sparsity(ExecuteConfig(enable_double_sparsity=True), [GROUP], HEADS)
    parts: Any = ("triton", (GROUP,), bind("cpu", {"all": "reference"}), CPU)
    with pytest.raises(ConfigError, match="torch_native for decode"):
        make_backend(*parts, decode="torch_native", sparsity=_sparsity(1, 1))


def _channels_of_radix_tiny(folder: Path) -> dict[str, Any]:
    """The options that make it sparse."""
    lists = [torch.randperm(64).tolist() for _ in range(2)]
    names = [f"model.layers.{layer}.self_attn.qk_proj" for layer in range(6)]
    (folder / "channels.json").write_text(json.dumps(dict.fromkeys(names, lists)))
    return {
        "enable_double_sparsity": True,
        "ds_channel_config_path": str(folder / "channels.json"),
        "ds_heavy_channel_num": 16,
        "ds_heavy_token_num": 32,
        "ds_sparse_decode_threshold": 64,
    }


@pytest.mark.parametrize("model", [{"is_embedding": True}, {"model_path": "BertModel"}])
def test_models_that_only_read_are_refused(model: dict[str, Any], tmp_path: Path) -> None:
    if "model_path" in model:
        model = {"model_path": str(cached_tiny(model["model_path"]))}
    config = ServerConfig.from_kwargs(**model, **_channels_of_radix_tiny(tmp_path))
    with pytest.raises(ConfigError, match="makes vectors"):
        read_model(config)


@needs_cpu
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_int4_rows_of_any_heads(dim: int) -> None:
    site = replace(SITE, head_dim=dim, v_dim=dim)
    case = Case.random(site, [(1, 400)], 16, 5, cache_dtype=INT4)
    ours, theirs = (_run(name, case, _sparsity(60, 0)) for name in ("cpu", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@needs_cpu
def test_tokens_in_turn_that_become_sparse(tmp_path: Path) -> None:
    options = _channels_of_radix_tiny(tmp_path) | {"max_total_tokens": 512, "log_level": "error"}
    options |= {"ds_heavy_token_num": 4, "ds_sparse_decode_threshold": 24}
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    found = []
    for steps in (1, 16):
        with Engine(**options, num_continuous_decode_steps=steps) as engine:
            found.append(engine.generate("Once upon a time", sampling)["output_ids"])
    assert found[0] == found[1]


@needs_cpu
def test_more_ranks_than_kv_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries of a KV head choose together, whatever the number of ranks."""
    options = _channels_of_radix_tiny(tmp_path) | {"max_total_tokens": 512, "log_level": "error"}
    body: dict[str, Any] = {
        "prompt": TEXT[:180],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
    }
    found = []
    for make, ranks in ((Engine, {}), (partial(thread_engine, monkeypatch, True), {"tp_size": 3})):
        with make(**options, **ranks) as engine:
            found.append(engine.generate(**body)["meta_info"]["output_token_logprobs"])
    assert found[0] == found[1]


EAGLE3 = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
OPTIONS: list[dict[str, Any]] = [
    {},
    {**EAGLE3},
    {**EAGLE3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
    {"speculative_algorithm": "STANDALONE", "grammar_backend": "llguidance"},
    {"pp_size": 2},
    {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    {"lora_paths": ["upper=zoo/models/radix-tiny-lora-upper"]},
    {"chunked_prefill_size": 64, "page_size": 64},
    {"speculative_algorithm": "NGRAM"},
    {"streaming_window": 1500},
    {"tp_size": 2},
    {"enable_hierarchical_cache": True, "hicache_ratio": 2.0},
    {"target_itl_ms": 5.0, "chunked_prefill_size": 32},
]


@needs_cpu
@pytest.mark.slow
def test_tokens_of_an_engine(tmp_path: Path) -> None:
    """Alone, in company, after hits and by drafts: the same tokens, and others than those of dense
    attention. (torch_native rounds scores otherwise, so other tokens may be chosen.)"""
    sparse = _channels_of_radix_tiny(tmp_path)
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    drawn = {"temperature": 0.9, "max_new_tokens": 12, "sampling_seed": 5, "n": 3}
    schema = json.dumps({"type": "object", "properties": {"fox": {"type": "string"}}})
    bound = {"temperature": 0, "max_new_tokens": 24, "json_schema": schema}
    prompts = [TEXT, TEXT + "Then", "Once upon a time"]
    found = []
    for options in ({"is_dense": True}, *OPTIONS):
        chosen = {} if options.pop("is_dense", False) else sparse
        with Engine(max_total_tokens=2048, log_level="error", **chosen, **options) as engine:
            together = [one["output_ids"] for one in engine.generate(prompts, params)]
            alone = [engine.generate(one, params)["output_ids"] for one in prompts]
            more = [one["output_ids"] for one in engine.generate(TEXT, drawn)]
            more.append(engine.generate(TEXT, bound)["output_ids"])
            # its output is now part of a prompt: dense, whatever has been computed before
            talk = TEXT + engine.generate(TEXT, params)["text"] + " And then"
            again = engine.generate(talk, params)["output_ids"]
            engine.flush_cache()
            assert engine.generate(talk, params)["output_ids"] == again
        assert alone == together
        found.append([*alone, *more, again])
    dense, *others = found
    assert all(other == others[0] for other in others)
    assert dense != others[0]
