"""ServerArgs: options as attributes of one object."""

import argparse
import dataclasses

import pytest

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig


def test_options_are_attributes() -> None:
    args = radixlm.ServerArgs(model_path="m", tp_size=2, api_key="hidden")
    assert (args.tp_size, args.page_size) == (2, ServerConfig().memory.page_size)
    assert "hidden" not in repr(args) and "tp_size=2" in repr(args)
    args.tp_size = 4
    assert args.tp_size == 4 and args.given()["tp_size"] == 4 and "page_size" in dir(args)
    with pytest.raises(ConfigError, match="tp-size"):
        args.tp_size = "many"
    assert args.tp_size == 4
    with pytest.raises(AttributeError, match="no option is called 'nothing'"):
        args.nothing  # noqa: B018
    with pytest.raises(ConfigError, match="page_size"):
        radixlm.ServerArgs(pagesize=1)
    with pytest.raises(ValueError, match="tp-size"):  # as SGLang's ServerArgs raises
        radixlm.ServerArgs(tp_size="many")


def test_it_reads_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    radixlm.ServerArgs.add_cli_args(parser)
    args = radixlm.ServerArgs.from_cli_args(
        parser.parse_args(["--model-path", "m", "--tp", "2", "--enable-metrics"])
    )
    assert (args.model_path, args.tp_size, args.enable_metrics) == ("m", 2, True)
    assert set(args.given()) == {"model_path", "tp_size", "enable_metrics"}
    old = parser.parse_args(["--enable-deepep-moe"])  # deprecated
    assert radixlm.ServerArgs.from_cli_args(old).moe_a2a_backend == "deepep"


def test_as_a_dataclass_it_has_what_was_set() -> None:
    args = radixlm.ServerArgs(model_path="m", tp_size=2, enable_deepep_moe=True)
    values = dataclasses.asdict(args)
    assert values == {"model_path": "m", "tp_size": 2, "enable_deepep_moe": True}
    assert radixlm.ServerArgs(**values).moe_a2a_backend == "deepep"
    assert dataclasses.replace(args, tp_size=4).given() == values | {"tp_size": 4}
    others = {"tp": 2, "attn_cp_size": None}  # an alias, and a name that has no effect
    assert dataclasses.asdict(radixlm.ServerArgs(**others)) == others
    assert dataclasses.is_dataclass(radixlm.ServerArgs)
    assert {"model_path", "page_size"} < {
        field.name for field in dataclasses.fields(args.__class__)
    }
