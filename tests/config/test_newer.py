"""Flags that SGLang has had since 0.5.2: known by name, mapped, without effect or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.conflicts import check
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.newer import newer_flags
from radixlm.config.option import names, options
from radixlm.config.parser import parse
from radixlm.config.server_config import ServerConfig
from radixlm.config.states import check_states, no_effect_notes

FIELDS = Path(__file__).with_name("newest_fields.txt").read_text().split()
"""The fields of SGLang 0.5.23's server arguments."""


def test_every_field_is_known_by_name() -> None:
    assert len(FIELDS) == len(set(FIELDS)) > 480
    assert [name for name in FIELDS if name not in {*names(), *DEPRECATED, *newer_flags()}] == []


def test_no_name_is_known_twice() -> None:
    assert not set(newer_flags()) & {*names(), *DEPRECATED}
    for flag in newer_flags().values():
        assert [bool(flag.to), bool(flag.why), bool(flag.what)].count(True) == 1
        assert not flag.to or flag.to in options()


def test_every_detail_names_a_known_flag() -> None:
    details = [flag.why.rpartition(" ")[2] for flag in newer_flags().values() if flag.why]
    parents = {word.removeprefix("--").replace("-", "_") for word in details if word[:2] == "--"}
    assert parents <= {*names(), *newer_flags(), "cuda_graph_bs", "max_prefill_tokens"}


@pytest.mark.parametrize("key", sorted(newer_flags()))
def test_a_newer_flag_is_mapped_ignored_with_a_reason_or_refused(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    flag = newer_flags()[key]
    caplog.set_level(logging.INFO)
    dashed = "--" + key.replace("_", "-")
    if flag.what:
        with pytest.raises(ConfigError, match="newer than what is built") as caught:
            parse([dashed, "7"])
        assert str(caught.value).startswith(dashed)
    elif flag.why:
        assert parse([dashed, "7", "--port", "5"])[1] == {"port"}
        assert f"{dashed} has no effect: {flag.why}" in caplog.text


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--cuda-graph-bs-decode", "1", "2", "4"], "cuda_graph_bs", (1, 2, 4)),
        (["--cuda-graph-max-bs-decode=32"], "cuda_graph_max_bs", 32),
        (["--disable-decode-cuda-graph"], "disable_cuda_graph", True),
        (["--disable-piecewise-cuda-graph"], "disable_prefill_cuda_graph", True),
        (["--cuda-graph-backend-decode", "disabled"], "disable_cuda_graph", True),
        (["--cuda-graph-backend-decode", "full"], "disable_cuda_graph", False),
        (["--incremental-streaming-output"], "stream_output", True),
        (["--language-model-only"], "enable_multimodal", False),
        (["--return-hidden-states-mode", "last"], "enable_return_hidden_states", True),
        (["--image-processor-backend", "pil"], "disable_fast_image_processor", True),
        (["--no-disable-decode-cuda-graph"], "disable_cuda_graph", False),
    ],
)
def test_mapped_flags(words: list[str], name: str, value: object) -> None:
    assert parse(words)[0].value(name) == value


@pytest.mark.parametrize(
    "words",
    [
        ["--attn-cp-size", "1"],
        ["--kv-canary", "none"],
        ["--model-config-parser", "hf"],
        ["--no-enable-watermark"],
        ["--grpc-port", "None"],
        ["--msprobe-dump-config=none"],
        ["--dllm-fdfo"],
        ["--prefill-delayer-max-delay-passes", "-1"],
    ],
)
def test_a_value_that_asks_for_nothing_does_not_stop_the_start(words: list[str]) -> None:
    assert parse([*words, "--port", "5"])[1] == {"port"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--attn-cp-size", "2"],
            "--attn-cp-size is newer than what is built: context parallelism",
        ),
        (["--grpc-port", "50051"], "newer than what is built: gRPC"),
        (["--cuda-graph-backend-decode", "x"], "'x' is not one of disabled, full, breakable"),
        (["--incremental-streaming-outputs"], "did you mean '--incremental-streaming-output'"),
        (["--cuda-graph-bs-decode", "0"], "--cuda-graph-bs: '0' is not in"),
        (["--language-model-only", "--enable-multimodal", "true"], "is given twice"),
        (["--enable-http3"], "did you mean '--enable-http2'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_faults_keep_their_message(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["attn_dp_size", "attention_data_parallel_size"])
def test_groups_of_attention_ranks(name: str) -> None:
    made = ServerConfig.from_kwargs(tp_size=4, **{name: 2})
    assert made == ServerConfig.from_kwargs(tp_size=4, dp_size=2, enable_dp_attention=True)
    assert made == ServerConfig.from_kwargs(tp_size=4, enable_dp_attention=True, **{name: 2})
    assert ServerConfig.from_kwargs(dp_size=3, **{name: 1}) == ServerConfig.from_kwargs(dp_size=3)
    with pytest.raises(ConfigError, match=f"--dp-size is given twice, once as {name}"):
        ServerConfig.from_kwargs(tp_size=4, dp_size=4, **{name: 2})


def test_yaml_and_keywords_know_the_names(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("incremental-streaming-output: true\nhisparse_config: {top_k: 1}\n")
    assert parse(["--config", str(path)])[0].serve.stream_output
    assert ServerConfig.from_kwargs(cuda_graph_bs_decode=[1, 2]).execute.cuda_graph_bs == (1, 2)
    assert ServerConfig.from_kwargs(ssl_keyfile=None, mm_process_config={}) == ServerConfig()
    blocks = {"speculative_dflash_block_size": 12, "speculative_dspark_block_size": 9}
    speculate = ServerConfig.from_kwargs(**blocks).speculate
    assert (speculate.speculative_num_draft_tokens, speculate.speculative_num_steps) == (12, 9)


@pytest.mark.parametrize(
    "given",
    [
        {"max_loras_per_batch": 4},
        {"max_loaded_loras": 4},
        {"show_time_cost": True},
        {"speculative_num_steps": 3},
        {"hicache_storage_prefetch_policy": "timeout"},
        {"disaggregation_bootstrap_port": 9000},
        {"oltp_traces_endpoint": "collector:4317"},
        {"trust_remote_code": True},
        {"sampling_backend": "flashinfer"},
        {"moe_runner_backend": "triton"},
        {"mm_attention_backend": "fa3"},
    ],
)
def test_a_flag_that_changes_nothing_by_itself_starts(given: dict[str, object]) -> None:
    config = ServerConfig.from_kwargs(**given)
    check_states(config)
    check(config)
    (note,) = no_effect_notes(config, "cpu")
    assert " has no effect: " in note


def test_a_detail_with_its_feature_stops_the_start() -> None:
    config = ServerConfig.from_kwargs(cpu_offload_gb=1, offload_mode="meta")
    with pytest.raises(ConfigError, match=r"--offload-mode meta is not built yet"):
        check_states(config)


NEWER_VALUES = """
    attention_backend=dsa,nsa,dsv4,compressed
    moe_runner_backend=deep_gemm,flashinfer_trtllm_routed,experimental_sgl_trtllm,cutlass,aiter
    moe_runner_backend=marlin,humming,experimental_sgl_marlin,hpc_ops
    mm_attention_backend=ascend_attn,amx_attn,xpu_attn
    hicache_io_backend=kernel_ascend hicache_mem_layout=page_first_kv_split,page_head
    load_balance_method=follow_bootstrap_room load_format=runai_streamer
"""
UNBUILT_VALUES = """
    attention_backend=flex_attention,cutedsl_mla,tokenspeed_mla,hpc_ops,intel_xpu
    moe_a2a_backend=mooncake,nixl,mori,ascend_fuseep,flashinfer,megamoe,pplx,ascend_tp
"""
"""Values of SGLang 0.5.23 that 0.5.2 does not have."""


@pytest.mark.parametrize("term", [*NEWER_VALUES.split(), *UNBUILT_VALUES.split()])
def test_newer_values_are_taken_or_refused_as_not_built(term: str) -> None:
    name, _, values = term.partition("=")
    for value in values.split(","):
        config, given = parse(["--" + name.replace("_", "-"), value])
        assert given == {name}
        if term in UNBUILT_VALUES.split():
            with pytest.raises(ConfigError, match=f"{value} is not built yet"):
                check_states(config)
        else:
            check_states(config)
