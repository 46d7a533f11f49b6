"""Recurrences over a state, token by token, as in ``kernels/ops/state.py`` (see its legend). A
prompt gives the same bits in any chunks and any batch. States are updated in place if
contiguous."""

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import expect
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import implements

SELECTIVE, DECAYED, DELTA = range(3)


def _input(x_BLHX: Tensor, name: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(address, numbers to the next sequence, token, head)."""
    sequence, token, head, _ = expect(x_BLHX, torch.float32, shape, name).stride()
    return x_BLHX.data_ptr(), sequence, token, head


def _run(
    kind: int, inputs: dict[str, tuple[Tensor, int]], keys: int, a: Tensor | None, state: Tensor,
    decays: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    v_BLHP = inputs["v"][0]
    batch, tokens, heads, values = v_BLHP.shape
    out, after = torch.empty(v_BLHP.shape), state.contiguous()
    expect(after.view(-1), torch.float32, (batch * heads * keys * values,), "state")
    tensors = [
        _input(x, name, (batch, tokens, heads, width)) for name, (x, width) in inputs.items()
    ]
    sizes = [batch, tokens, heads, keys, values]
    native().scan(
        kind, sizes, decays, tensors, 0 if a is None else a.data_ptr(), after.data_ptr(),
        out.data_ptr(), 0,
    )  # fmt: skip
    return out, after


@implements("decayed_sum", name="by_token", device="cpu")
def decayed_sum(log_BLC: Tensor, added_BLC: Tensor, state_BC: Tensor) -> tuple[Tensor, Tensor]:
    """h = exp(log) h + added, a number a channel: [B, L, C] and the state.

    A multiply-add of torch a token: there is no sum over a state's numbers, for which the scans
    of the extension are made (2 to 16 times slower here).
    """
    batch, tokens, channels = added_BLC.shape
    factors, h_BC = torch.exp(log_BLC), state_BC
    out_LBC = added_BLC.new_empty(tokens, batch, channels)
    steps = zip(factors.unbind(1), added_BLC.unbind(1), out_LBC.unbind(0), strict=True)
    for factor_BC, new_BC, after_BC in steps:
        h_BC = torch.addcmul(new_BC, factor_BC, h_BC, out=after_BC)
    return out_LBC.transpose(0, 1), h_BC.clone()


@implements("decayed_max", name="by_token", device="cpu")
def decayed_max(log_BLH: Tensor, x_BLH: Tensor, state_BH: Tensor) -> tuple[Tensor, Tensor]:
    """h = max(log + h, x), a number a head: [B, L, H] and the state."""
    parts = []
    for log_BH, x_BH in zip(log_BLH.unbind(1), x_BLH.unbind(1), strict=True):
        state_BH = torch.maximum(log_BH + state_BH, x_BH)
        parts.append(state_BH)
    return torch.stack(parts, 1), state_BH


@implements("fading_mean", name="by_token", device="cpu")
def fading_mean(
    key_BLC: Tensor, value_BLC: Tensor, first_C: Tensor, fade_C: Tensor, state_B3C: Tensor
) -> tuple[Tensor, Tensor]:
    """RWKV 4: means of the values so far, weighted by exp(key + fade * their age); the newest has
    ``first`` added to its key. [B, L, C] and the state: the sums of weighted values and of weights,
    both over exp of the third number."""
    total, weight, exponent = state_B3C.unbind(1)
    parts = []
    for key, value in zip(key_BLC.unbind(1), value_BLC.unbind(1), strict=True):
        bonus = key + first_C
        largest = torch.maximum(exponent, bonus)
        kept, new = torch.exp(exponent - largest), torch.exp(bonus - largest)
        parts.append((kept * total + new * value) / (kept * weight + new))
        faded = exponent + fade_C
        exponent = torch.maximum(faded, key)
        kept, new = torch.exp(faded - exponent), torch.exp(key - exponent)
        total, weight = kept * total + new * value, kept * weight + new
    return torch.stack(parts, 1), torch.stack((total, weight, exponent), 1)


@implements("selective_scan", name="native", device="cpu")
def selective_scan(
    x_BLC: Tensor, dt_BLC: Tensor, a_CN: Tensor, b_BLN: Tensor, c_BLN: Tensor, state_BCN: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba: h = exp(dt a) h + dt x b; y = h c. [B, L, C] and the state."""
    channels, size = a_CN.shape
    x, dt, b, c = (t[:, :, None] for t in (x_BLC, dt_BLC, b_BLN, c_BLN))
    inputs = {"q": (c, size), "k": (b, size), "v": (x, channels), "decay": (dt, channels)}
    a_CN = expect(a_CN.contiguous(), torch.float32, (channels, size), "a")
    y_BLHP, state = _run(SELECTIVE, inputs, size, a_CN, state_BCN)
    return y_BLHP[:, :, 0], state


@implements("decayed_attention", name="native", device="cpu")
def decayed_attention(
    x_BLHP: Tensor, log_BLH: Tensor, b_BLHN: Tensor, c_BLHN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """h = exp(log) h + x b^T; y = h c, a matrix a head: [B, L, H, P] and the state."""
    size, values = b_BLHN.shape[3], x_BLHP.shape[3]
    inputs = {
        "q": (c_BLHN, size), "k": (b_BLHN, size), "v": (x_BLHP, values),
        "decay": (log_BLH[..., None], 1),
    }  # fmt: skip
    return _run(DECAYED, inputs, size, None, state_BHPN)


@implements("delta_rule", name="native", device="cpu")
def delta_rule(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHP: Tensor, log_BLHK: Tensor, beta_BLH: Tensor,
    state_BHKP: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h = exp(log) h; h += k beta (v - k h)^T; y = q h: [B, L, H, P] and the state.

    ``log`` has one number a head ([..., 1]) or one a key channel.
    """
    keys, decays = q_BLHK.shape[3], log_BLHK.shape[3]
    factors = log_BLHK if decays == 1 else log_BLHK.exp()
    inputs = {
        "q": (q_BLHK, keys), "k": (k_BLHK, keys), "v": (v_BLHP, v_BLHP.shape[3]),
        "decay": (factors, decays), "beta": (beta_BLH[..., None], 1),
    }  # fmt: skip
    return _run(DELTA, inputs, keys, None, state_BHKP, decays)
