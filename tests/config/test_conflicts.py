"""Conflicts and rules between options: each is violated by an example and satisfied by a similar
one."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.adapters import LoraPath, read_lora_path
from radixlm.config.conflicts import CONFLICTS, Conflict, check, problems
from radixlm.config.observe import bucket_values
from radixlm.config.option import options
from radixlm.config.server_config import ServerConfig

SAMPLES: dict[type, Any] = {int: 2, float: 0.5, bool: True, str: "sample"}


def holding(term: str) -> dict[str, Any]:
    """A value that makes one side of a pair true."""
    name, _, wanted = term.partition("=")
    option = options()[name]
    sample = wanted.split("|")[0] or next(
        (choice for choice in option.flag.allowed if choice != option.default),
        "{}" if option.flag.is_json else SAMPLES[option.kind],
    )
    return {name: sample}


@pytest.mark.parametrize("pair", CONFLICTS, ids=lambda pair: f"{pair.first}+{pair.second}")
def test_each_pair_is_refused_with_its_reason(pair: Conflict) -> None:
    config = ServerConfig.from_kwargs(**holding(pair.first), **holding(pair.second))
    lines = [line for line in problems(config) if pair.reason in line]
    assert len(lines) == 1
    assert options()[pair.first.partition("=")[0]].dashed in lines[0]
    assert options()[pair.second.partition("=")[0]].dashed in lines[0]
    for alone in (pair.first, pair.second):
        assert not [
            line
            for line in problems(ServerConfig.from_kwargs(**holding(alone)))
            if "cannot be combined" in line
        ]


def test_every_term_names_options_and_choices() -> None:
    for pair in CONFLICTS:
        for term in (pair.first, pair.second):
            name, _, wanted = term.partition("=")
            assert set(wanted.split("|")) - {""} <= set(options()[name].flag.allowed)


NODES = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "h:1", "cluster_secret_file": "f"}


@pytest.mark.parametrize(
    ("bad", "good", "message"),
    [
        (NODES | {"tp_size": 1}, {"tp_size": 2}, "--nnodes 2 does not divide"),
        ({"node_rank": 1}, NODES, "--node-rank 1"),
        (NODES | {"dist_init_addr": None}, {"dist_init_addr": "h:1"}, "needs --dist-init-addr"),
        (NODES | {"cluster_secret_file": None}, NODES, "needs --cluster-secret-file FILE"),
        (NODES | {"dp_size": 2}, {"dp_size": 1}, "--dp-size 1 works"),
        (NODES | {"disaggregation_mode": "prefill"}, {"host": "0.0.0.0"}, "0.0.0.0 works, or an"),
        (
            NODES | {"disaggregation_mode": "prefill"},
            {"dist_init_addr": "127.0.0.1:1"},
            "ranks of other hosts cannot reach --host 127.0.0.1",
        ),
        ({"ep_size": 2}, {"tp_size": 2}, "= 1: 1 does, or 2 with --tp-size = 2"),
        ({"moe_dense_tp_size": 2}, {"tp_size": 2}, "--moe-dense-tp-size 2: 1 and --tp-size 1 work"),
        ({"enable_dp_attention": True, "tp_size": 4, "dp_size": 3}, {"dp_size": 4}, "= 4: 2 does"),
        (
            {"enable_dp_lm_head": True},
            {"enable_dp_attention": True, "tp_size": 2, "dp_size": 2},
            "--enable-dp-lm-head needs",
        ),
        (
            {"streaming_window": 61, "context_length": 64},
            {"streaming_window": 60, "context_length": 64},
            "16 to 60 tokens work",
        ),
        ({"streaming_window": 15}, {"streaming_window": 16}, "16 to"),
        ({"chunked_prefill_size": 0}, {"chunked_prefill_size": -1}, "--chunked-prefill-size 0"),
        (
            {"chunked_prefill_size": -1, "target_itl_ms": 20.0},
            {"chunked_prefill_size": 512, "target_itl_ms": 20.0},
            "--chunked-prefill-size 2048 works, not -1",
        ),
        ({"max_total_tokens": 15, "page_size": 16}, {"page_size": 15}, "holds no page of 16"),
        (
            {"bucket_time_to_first_token": [2, 1]},
            {"bucket_time_to_first_token": [1, 2]},
            "--bucket-time-to-first-token must rise from value to value; 1.0 2.0 works",
        ),
        ({"bucket_inter_token_latency": [1, 1]}, {"bucket_inter_token_latency": [1]}, "must rise"),
        ({"lora_paths": ["a", "a"]}, {"lora_paths": ["a", "b"]}, "'a' twice"),
        ({"lora_target_modules": ["all", "q_proj"]}, {"lora_target_modules": ["all"]}, "alone"),
        (
            {"lora_paths": ["a=x"], "max_loaded_loras": 7, "max_loras_per_batch": 8},
            {"lora_paths": ["a=x"], "max_loaded_loras": 8, "max_loras_per_batch": 8},
            "7 is below --max-loras-per-batch 8",
        ),
        (
            {"max_loaded_loras": 1, "max_loras_per_batch": 1, "lora_paths": ["a", "b"]},
            {"max_loaded_loras": 2},
            "lists 2 adapters",
        ),
        (
            {
                "lora_paths": [{"lora_name": "a", "lora_path": "x", "pinned": True}],
                "max_loras_per_batch": 1,
            },
            {"max_loras_per_batch": 2},
            "pins 1 adapters, --max-loras-per-batch 1 allows 0",
        ),
        (
            {"enable_lora": True, "enable_torch_compile": True},
            {"enable_torch_compile": False},
            "leave out --enable-torch-compile",
        ),
        (
            {"enable_deterministic_inference": True, "attention_backend": "torch_native"},
            {"attention_backend": "cpu"},
            "its rows depend on the batch; cpu works",
        ),
        (
            {"enable_deterministic_inference": True, "enable_torch_compile": True},
            {"enable_torch_compile": False},
            "leave one of them out",
        ),
        ({"kernel": ["rms_norm"]}, {"kernel": ["rms_norm=reference"]}, "not NAME=VALUE"),
        ({"kernel": ["a=b", "a=c"]}, {"kernel": ["a=b", "c=c"]}, "--kernel sets a twice"),
        ({"logit_processor": ["a=b"]}, {"logit_processor": ["a=b:C"]}, "x=package.mod:Cls works"),
    ],
)
def test_rules(bad: dict[str, Any], good: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(ServerConfig.from_kwargs(**bad))
    assert message in str(caught.value)
    check(ServerConfig.from_kwargs(**(bad | good)))


def test_the_defaults_are_fine() -> None:
    assert problems(ServerConfig()) == []


@pytest.mark.parametrize(
    "rule",
    [
        "default",
        "tse 1000 2 8",
        "tse 10 1.5 1",
        "customer 1",
        "customer 10 50 100 500",
        "customer 100 0 10.5",
    ],
)
def test_valid_bucket_rules(rule: str) -> None:
    check(ServerConfig.from_kwargs(prompt_tokens_buckets=rule.split()))
    check(ServerConfig.from_kwargs(generation_tokens_buckets=rule))


@pytest.mark.parametrize(
    "rule",
    [
        "defaults",
        "default 1",
        "tse 1000 2",
        "tse 1000 1 8",
        "tse 1000 2 0",
        "tse 1000 2 1.5",
        "tse a 2 8",
        "tse nan 2 8",
        "tse 1000 2 9999",
        "customer",
        "customer 1 1",
        "customer -1 2",
        "customer x",
        "customer nan",
        "customer inf",
        "",
    ],
)
def test_wrong_bucket_rules(rule: str) -> None:
    with pytest.raises(ConfigError, match="--generation-tokens-buckets"):
        check(ServerConfig.from_kwargs(generation_tokens_buckets=rule))


def test_bucket_rules_stand_for_bounds() -> None:
    assert bucket_values(None, (1.0,)) == bucket_values(("default",), (1.0,)) == (1.0,)
    assert bucket_values(("customer", "5", "1"), ()) == (1.0, 5.0)
    around = (984.0, 992.0, 996.0, 998.0, 1000.0, 1002.0, 1004.0, 1008.0, 1016.0)
    assert bucket_values(("tse", "1000", "2", "8"), ()) == around
    assert bucket_values(("tse", "3", "2", "4"), ()) == (0.0, 1.0, 3.0, 5.0, 7.0)


@pytest.mark.parametrize("label", ["model_name", "le", "__x", "a-b", "1a", ""])
def test_labels_of_customers_are_new_names(label: str) -> None:
    with pytest.raises(ConfigError, match="customer-labels"):
        check(ServerConfig.from_kwargs(tokenizer_metrics_allowed_customer_labels=["team", label]))
    with pytest.raises(ConfigError, match="team: no name"):
        check(ServerConfig.from_kwargs(tokenizer_metrics_allowed_customer_labels=["team", "team"]))
    with pytest.raises(ConfigError, match="labels-header"):
        check(ServerConfig.from_kwargs(tokenizer_metrics_custom_labels_header="a b"))


def test_paths_of_adapters() -> None:
    assert read_lora_path("/a") == LoraPath("/a", "/a")
    assert read_lora_path("x=/a=b") == LoraPath("x", "/a=b")
    record = '{"lora_name": "x", "lora_path": "/a", "pinned": true}'
    assert read_lora_path(record) == LoraPath("x", "/a", True)


@pytest.mark.parametrize("text", ["", "=a", "a=", "{", '{"lora_name": "x"}'])
def test_bad_paths_of_adapters(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-paths"):
        read_lora_path(text)
