"""Every SGLang flag is accepted, with its type and default."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from radixlm.config.deprecated import DEPRECATED
from radixlm.config.option import names, options
from radixlm.config.parser import build_parser, collect, parse
from radixlm.config.server_config import ServerConfig, flat
from radixlm.config.values import example

ROWS = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("reference_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
PARSER = build_parser()
KINDS = {"int": int, "float": float, "str": str, "nullable_str": str, "switch": bool}
OUR_DEFAULTS = {
    "--model-path": "radix-tiny",
    "--model": "radix-tiny",
    "--tool-call-parser": "auto",
    "--reasoning-parser": "auto",
    "--max-queued-requests": None,
    "--page-size": None,
    "--hicache-storage-prefetch-policy": "auto",
    "--hybrid-kvcache-ratio": None,
    "--cuda-graph-bs": None,
    "--numa-node": None,
    "--enable-multimodal": None,
    "--max-loras-per-batch": None,
    "--num-continuous-decode-steps": None,
}
"""Where we differ on purpose, or where the reference's tables disagree with each other."""


def test_the_list_is_complete() -> None:
    assert len(ROWS) == 236
    assert len({flag for flag, _, _ in ROWS}) == 236


@pytest.mark.parametrize(("flag", "kind", "default"), ROWS, ids=[row[0] for row in ROWS])
def test_flag_is_accepted(flag: str, kind: str, default: str, tmp_path: Path) -> None:
    key = flag.removeprefix("--").replace("-", "_")
    if key == "config":
        path = tmp_path / "config.yaml"
        path.write_text("port: 1")
        assert parse([flag, str(path)])[1] == {"port"}
        return
    if key in DEPRECATED:
        assert collect(PARSER.read([flag]))[1] == {DEPRECATED[key].to}
        return
    option = options()[names()[key]]
    if kind != "-" and key != "debug_tensor_dump_inject":
        assert option.kind is KINDS[kind]
    argv = [flag] if option.kind is bool else [flag, example(option)]
    assert collect(PARSER.read(argv))[1] == {option.name}
    if default != "-" and flag not in OUR_DEFAULTS:
        assert is_same(option.default, default.strip("'")), (flag, option.default, default)


def is_same(ours: object, shown: str) -> bool:
    """Whether our default equals the one in SGLang's table."""
    if isinstance(ours, int | float) and not isinstance(ours, bool):
        return ours == float(shown)
    return str(ours) == shown


@pytest.mark.parametrize("key", sorted(DEPRECATED))
def test_deprecated_flags_warn_in_one_line(key: str, caplog: pytest.LogCaptureFixture) -> None:
    renamed = DEPRECATED[key]
    flag = "--" + key.replace("_", "-")
    option = options().get(renamed.to)
    argv = [flag, example(option)] if option and renamed.takes_value else [flag]
    with caplog.at_level(logging.WARNING):
        config, given = collect(PARSER.read(argv))
    assert given == ({renamed.to} if renamed.to else frozenset())
    (record,) = caplog.records
    assert flag in record.getMessage()
    if renamed.value is not None:
        assert config.value(renamed.to) == renamed.value


def test_expert_parallel_follows_tensor_parallel() -> None:
    config, _ = parse(["--enable-ep-moe", "--tp", "4"])
    assert (config.parallel.tp_size, config.parallel.ep_size) == (4, 4)


def test_a_new_flag_overrides_the_deprecated_one(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = parse(["--enable-triton-kernel-moe", "--moe-runner-backend", "triton"])
    assert config.execute.moe_runner_backend == "triton"
    assert "overridden by --moe-runner-backend" in caplog.text


def test_deprecated_values_are_mapped(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = parse(["--model-impl", "sglang", "--attention-backend", "intel_amx"])
    assert config.model.model_impl == "radixlm"
    assert config.execute.attention_backend == "cpu"
    assert len(caplog.records) == 2


def test_flat_shows_every_option_under_its_name() -> None:
    shown = flat(ServerConfig.from_kwargs(api_key="k", cuda_graph_bs=[1, 2]))
    assert set(shown) == set(options())
    assert shown["api_key"] == "***"
    assert shown["cuda_graph_bs"] == [1, 2]
    assert flat(ServerConfig.from_kwargs(api_key="k"), show_secrets=True)["api_key"] == "k"
