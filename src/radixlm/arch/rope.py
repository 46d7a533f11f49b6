"""Frequencies of rotary position embeddings, equal to Hugging Face's ``modeling_rope_utils``.

    angle[position, j] = position * inv_freq[j]; cos and sin are multiplied by attention_factor

Two kinds depend on the length of the sequence. Hugging Face takes one set of frequencies for all
tokens of a forward pass, by the largest position in it:

- longrope: the long factors if length > original_max_position_embeddings, else the short ones;
- dynamic: the base grows with the length once it exceeds max_position_embeddings.

Cached keys are not rotated again, neither there nor here. So an engine must fix the length for each
request, or a cached prefix would be invalid.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.spec import Rope
from radixlm.arch.yarn import yarn_mscale
from radixlm.base.record import replace

Frequencies = NDArray[np.float32]
_Params = Mapping[str, Any]


def inv_freq(rope: Rope, seq_len: int = 0) -> tuple[Frequencies, float]:
    """Inverse frequencies float32 [rope.dim / 2] and the factor of cos and sin.

    ``seq_len``: tokens of the sequence, only read where ``rope.depends_on_length``.
    """
    if rope.negative_angles:
        frequencies, factor = inv_freq(replace(rope, negative_angles=False), seq_len)
        return -frequencies, factor
    if rope.scaling is None:
        return _plain(rope.theta, rope.dim), 1.0
    return _KINDS[rope.scaling.kind](rope, dict(rope.scaling.params), seq_len)


def _plain(theta: float, dim: int) -> Frequencies:
    return (1.0 / _powers(theta, dim)).astype(np.float32)


def _powers(theta: float, dim: int) -> Frequencies:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.asarray(np.float64(theta) ** exponents.astype(np.float64), dtype=np.float32)


def _linear(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    return _plain(rope.theta, rope.dim) / np.float32(p["factor"]), 1.0


def _dynamic(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    max_len = p["max_position_embeddings"]
    factor, length = p["factor"], max(seq_len, max_len)
    stretch = (factor * length / max_len) - (factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim), 1.0


def _yarn(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    before = p["original_max_position_embeddings"]
    factor = p.get("factor") or p["max_position_embeddings"] / before
    powers = _powers(rope.theta, rope.dim)
    low, high = (
        _channel_of(p.get(key) or default, rope, before)
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low)
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = 1.0 / (np.float32(factor) * powers)
    frequencies = stretched * (1 - kept) + (1.0 / powers) * kept
    return frequencies.astype(np.float32), _yarn_attention_factor(p, factor)


def _channel_of(rotations: float, rope: Rope, length: int) -> float:
    """The channel pair (a real number) that makes ``rotations`` turns in ``length`` tokens."""
    log_period = math.log(length / (rotations * 2 * math.pi))
    return rope.dim * log_period / (2 * math.log(rope.theta))


def _yarn_attention_factor(p: _Params, factor: float) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    return yarn_mscale(factor)


def _longrope(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    before = p["original_max_position_embeddings"]
    factors = np.asarray(
        p["long_factor"] if seq_len > before else p["short_factor"], dtype=np.float32
    )
    frequencies = (1.0 / (factors * _powers(rope.theta, rope.dim))).astype(np.float32)
    if p.get("attention_factor") is not None:
        return frequencies, float(p["attention_factor"])
    stretch = p.get("factor") or p["max_position_embeddings"] / before
    if stretch <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(stretch) / math.log(before))


def _llama3(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    frequencies = _plain(rope.theta, rope.dim)
    before, low, high = (
        p[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = (2 * math.pi / frequencies).astype(np.float32)
    factor = np.float32(p["factor"])
    scaled = np.where(wavelength > before / low, frequencies / factor, frequencies)
    smooth = (np.float32(before) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (wavelength >= before / high) & (wavelength <= before / low)
    blend = (1 - smooth) * scaled / factor + smooth * scaled
    return np.where(between, blend, scaled).astype(np.float32), 1.0


def _proportional(rope: Rope, p: _Params, seq_len: int) -> tuple[Frequencies, float]:
    """The first share of the pairs rotates as in a whole head; the rest does not rotate."""
    frequencies = _plain(rope.theta, rope.dim) / np.float32(p.get("factor", 1.0))
    frequencies[int(p.get("partial_rotary_factor", 1.0) * rope.dim // 2) :] = 0
    return frequencies, 1.0


_KINDS: Mapping[str, Callable[[Rope, _Params, int], tuple[Frequencies, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
