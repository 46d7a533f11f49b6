"""Which implementation runs each op: chosen once, then plain attributes.

An implementation is a function with the signature of its reference in ``kernels/ops``, announced
by ``@implements(op, name=..., device=...)`` in a backend package. ``bind`` imports the backends
of a device and picks; hot paths call ``kernels.rms_norm(...)`` without a test.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.kernels.ops import activation, embedding, linear, lora, moe, norm, rope, state

log = logging.getLogger(__name__)

REFERENCE = "reference"
INVARIANT = "invariant"  # rows have the same bits in every batch
INVARIANT_OPS = ("pack_linear", "pack_gated", "pack_tied", "pack_head_linear", "pack_experts")

# device type -> (extension that must import, modules that register implementations)
BACKENDS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "cpu": (
        (
            "radixlm._cpu",
            (
                "radixlm.kernels.cpu.ops",
                "radixlm.kernels.cpu.scan",
                "radixlm.kernels.cpu.fused",
            ),
        ),
    ),
    "cuda": (
        (
            "triton",
            (
                "radixlm.kernels.triton.ops",
                "radixlm.kernels.triton.linear",
                "radixlm.kernels.triton.lora",
            ),
        ),
    ),
}
# (device type, name of its implementations) -> as above, for backends that must be named
# explicitly: interpreted kernels (TRITON_INTERPRET=1) are for tests
NAMED_BACKENDS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("cpu", "triton"): BACKENDS["cuda"][0],
    **dict.fromkeys(
        (("cpu", INVARIANT), ("cuda", INVARIANT)), ("triton", ("radixlm.kernels.triton.invariant",))
    ),
}

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


REFERENCES: dict[str, Callable[..., Any]] = {
    "rms_norm": norm.rms_norm,
    "add_rms_norm": norm.add_rms_norm,
    "layer_norm": norm.layer_norm,
    "add_layer_norm": norm.add_layer_norm,
    "rope": rope.rope,
    "rope_angles": rope.rope_angles,
    "prepare_qk": rope.prepare_qk,
    "sigmoid": activation.sigmoid,
    "softcap": activation.softcap,
    "activate": activation.activate,
    "activate_gated": activation.activate_gated,
    "embedding": embedding.embedding,
    "pack_linear": linear.pack_linear,
    "pack_gated": linear.pack_gated,
    "pack_tied": linear.pack_tied,
    "pack_head_linear": linear.pack_head_linear,
    "route": moe.route,
    "pack_experts": moe.pack_experts,
    "decayed_sum": state.decayed_sum,
    "decayed_max": state.decayed_max,
    "fading_mean": state.fading_mean,
    "selective_scan": state.selective_scan,
    "decayed_attention": state.decayed_attention,
    "delta_rule": state.delta_rule,
    "pack_adapter": lora.pack_adapter,
    "lora_rows": lora.lora_rows,
    "lora_slots": lora.lora_slots,
}
OPS = tuple(REFERENCES)


class Kernels(Record):
    """The chosen implementation of every op; ``chosen`` maps each op to the name of its own."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., Tensor]
    rope: Callable[..., None]
    rope_angles: Callable[..., Tensor]
    prepare_qk: Callable[..., None]
    sigmoid: Callable[..., Tensor]
    softcap: Callable[..., Tensor]
    activate: Callable[..., Tensor]
    activate_gated: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    pack_linear: Callable[..., linear.PackedLinear]
    pack_gated: Callable[..., linear.PackedLinear]
    pack_tied: Callable[..., linear.TiedTable]
    pack_head_linear: Callable[..., linear.HeadLinear]
    route: Callable[..., tuple[Tensor, Tensor]]
    pack_experts: Callable[..., moe.PackedExperts]
    decayed_sum: Callable[..., tuple[Tensor, Tensor]]
    decayed_max: Callable[..., tuple[Tensor, Tensor]]
    fading_mean: Callable[..., tuple[Tensor, Tensor]]
    selective_scan: Callable[..., tuple[Tensor, Tensor]]
    decayed_attention: Callable[..., tuple[Tensor, Tensor]]
    delta_rule: Callable[..., tuple[Tensor, Tensor]]
    pack_adapter: Callable[..., lora.PackedAdapter]
    lora_rows: Callable[..., lora.LoraRows]
    lora_slots: Callable[..., lora.LoraSlots | None]
    chosen: Mapping[str, str]

    @property
    def copies_weights(self) -> bool:
        """Whether packing copies the weight, so that it may be in borrowed memory."""
        return self.chosen["pack_linear"] != REFERENCE

    @property
    def records_adapters(self) -> bool:
        """Whether steps with adapters may be recorded."""
        return self.chosen["lora_slots"] != REFERENCE

    @property
    def supports_ungated_experts(self) -> bool:
        """Whether experts without a gate may be packed (``is_gated`` False)."""
        return self.chosen["pack_experts"] == "native"


class Implementation(Record):
    """One registered implementation of an op."""

    op: str
    name: str
    device: str
    function: Callable[..., Any]
    is_default: bool = True  # False: only when asked for by name


_REGISTERED: dict[tuple[str, str, str], Implementation] = {}


def implements(
    op: str, *, name: str, device: str, is_default: bool = True
) -> Callable[[AnyFunction], AnyFunction]:
    """Register the decorated function as implementation ``name`` of ``op`` on ``device``."""
    if op not in OPS:
        raise KeyError(f"no op is called {op!r}")

    def register(function: AnyFunction) -> AnyFunction:
        _REGISTERED[op, name, device] = Implementation(op, name, device, function, is_default)
        return function

    return register


def implementations(device: str) -> tuple[Implementation, ...]:
    """All implementations for the device type, without references."""
    load_backends(device)
    return tuple(i for i in _REGISTERED.values() if i.device == device)


def load_backends(device: str) -> list[str]:
    """Import the device's backends; return the missing extensions with the reason."""
    missing = []
    for extension, modules in BACKENDS.get(device, ()):
        try:
            _load(extension, modules)
        except ImportError as error:
            missing.append(f"{extension} ({error})")
    return missing


def _load(extension: str, modules: tuple[str, ...]) -> None:
    importlib.import_module(extension)
    for module in modules:
        importlib.import_module(module)


def bind(device: str, overrides: Mapping[str, str] | None = None) -> Kernels:
    """Choose every op for a device type ("cpu", "cuda").

    ``overrides`` maps an op, or "all" (that have one of that name), to the name of an
    implementation ("reference", ...), as ``--kernel rms_norm=reference`` gives them. ConfigError
    for a name that does not exist.
    """
    overrides = dict(overrides or {})
    default = overrides.pop("all", "")
    if default != REFERENCE:
        for extension in load_backends(device):
            log.warning(
                "no fast kernels: %s; the torch reference runs instead, many times slower",
                extension,
            )
    for name in {default, *overrides.values()}:
        if (device, name) in NAMED_BACKENDS:
            _load(*NAMED_BACKENDS[device, name])
    unknown = sorted(set(overrides) - set(OPS))
    if unknown:
        raise ConfigError(f"--kernel {unknown[0]}=...: no such op; the ops are: {', '.join(OPS)}")
    having = {op for op in OPS if (op, default, device) in _REGISTERED}
    if default not in ("", REFERENCE) and not having:
        raise ConfigError(f"--kernel all={default}: unknown on {device}; reference is everywhere")
    for op in having if default != REFERENCE else OPS:
        overrides.setdefault(op, default)
    choices = {op: _choose(op, device, overrides.get(op, "")) for op in OPS}
    functions = {op: choice.function for op, choice in choices.items()}
    return Kernels(**functions, chosen={op: choice.name for op, choice in choices.items()})


def _choose(op: str, device: str, name: str) -> Implementation:
    reference = Implementation(op, REFERENCE, device, REFERENCES[op])
    if name == REFERENCE:
        return reference
    available = [i for i in _REGISTERED.values() if i.op == op and i.device == device]
    if not name:
        return next((i for i in available if i.is_default), reference)
    for implementation in available:
        if implementation.name == name:
            return implementation
    names = ", ".join([REFERENCE, *(i.name for i in available)])
    raise ConfigError(f"--kernel {op}={name}: unknown on {device}; choose one of: {names}")
