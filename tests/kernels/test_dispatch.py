"""Choice of implementations: defaults, overrides, a missing extension."""

from __future__ import annotations

import logging

import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.kernels import dispatch
from radixlm.kernels.dispatch import OPS, REFERENCES, bind, implements


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device type for the test, so that real backends do not matter."""
    monkeypatch.setattr(dispatch, "_REGISTERED", {})

    @implements("rms_norm", name="doubling", device="toy")
    def doubling(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return 2 * x


def test_without_a_backend_everything_is_the_reference() -> None:
    kernels = bind("toy")
    assert all(getattr(kernels, op) is REFERENCES[op] for op in OPS)
    assert set(kernels.chosen.values()) == {"reference"}


@pytest.mark.usefixtures("announced")
def test_a_registered_implementation_is_used_unless_overridden() -> None:
    assert bind("toy").chosen["rms_norm"] == "doubling"
    assert bind("toy").chosen["layer_norm"] == "reference"
    assert bind("toy", {"rms_norm": "reference"}).chosen["rms_norm"] == "reference"
    assert bind("toy", {"all": "reference"}).chosen["rms_norm"] == "reference"
    both = bind("toy", {"all": "reference", "rms_norm": "doubling"})
    assert both.chosen["rms_norm"] == "doubling"
    assert bind("other").chosen["rms_norm"] == "reference"


@pytest.mark.usefixtures("announced")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_nrom": "reference"}, "--kernel rms_nrom=.*no such op.*rms_norm"),
        ({"rms_norm": "cuda"}, "--kernel rms_norm=cuda.*choose one of: reference, doubling"),
    ],
)
def test_unknown_names_are_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind("toy", overrides)


def test_a_missing_extension_warns_once_and_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = {"toy": (("radixlm.no_such_extension", ("radixlm.kernels.no_such_backend",)),)}
    monkeypatch.setattr(dispatch, "BACKENDS", missing)
    with caplog.at_level(logging.WARNING):
        kernels = bind("toy")
    assert set(kernels.chosen.values()) == {"reference"}
    assert len(caplog.records) == 1
    assert "radixlm.no_such_extension" in caplog.text


def test_only_ops_can_be_registered() -> None:
    with pytest.raises(KeyError, match="no op is called 'rms'"):
        implements("rms", name="x", device="cpu")


@pytest.mark.usefixtures("announced")
def test_all_selects_the_ops_that_have_the_implementation() -> None:
    chosen = bind("toy", {"all": "doubling"}).chosen
    assert chosen["rms_norm"] == "doubling" and chosen["layer_norm"] == "reference"
    with pytest.raises(ConfigError, match="--kernel all=tripling: unknown on toy"):
        bind("toy", {"all": "tripling"})


@pytest.mark.usefixtures("announced")
def test_optional_implementations_must_be_requested() -> None:
    @implements("layer_norm", name="slow", device="toy", is_default=False)
    def slow(*_: object) -> None: ...

    assert bind("toy").chosen["layer_norm"] == "reference"
    assert bind("toy", {"layer_norm": "slow"}).chosen["layer_norm"] == "slow"


def test_interpreted_kernels_run_on_a_cpu_by_name() -> None:
    pytest.importorskip("triton")
    chosen = bind("cpu", {"all": "triton"}).chosen
    assert chosen["rms_norm"] == chosen["prepare_qk"] == "triton"
    assert bind("cpu").chosen["rms_norm"] != "triton"
