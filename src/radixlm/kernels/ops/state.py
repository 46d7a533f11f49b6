"""Recurrences over a state of fixed size, chunked for prompts.

All take [B, L, ...] inputs of B sequences with L new tokens each and the states before them, and
return the outputs and the states after them, perhaps in the same memory. Arithmetic is float32.
Chunks start at the first new token, so that results of a prompt in several parts differ by
rounding.

Legend: B sequences, L tokens, C channels, H heads, G groups, N state channels, P value channels,
K key channels, W width of a convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SCAN_CHUNK = 32  # tokens of an elementwise scan in one chunk
MATRIX_CHUNK = 64  # tokens whose pairwise products are computed in one chunk


def causal_conv(
    x_BLC: Tensor, state_BCw: Tensor, weight_CW: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A convolution a channel over the last W tokens; w = W - 1 tokens are the state."""
    whole_BCM = torch.cat((state_BCw, x_BLC.transpose(1, 2)), -1)
    y_BCL = F.conv1d(whole_BCM, weight_CW[:, None], bias_C, groups=weight_CW.shape[0])
    width = state_BCw.shape[-1]
    return y_BCL.transpose(1, 2).contiguous(), whole_BCM[
        ..., whole_BCM.shape[-1] - width :
    ].contiguous()


def linear_scan(a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """h[t] = a[t] * h[t - 1] + b[t], element by element: [B, L, ...] and the last h.

    Inside a chunk by doubling, which never divides: stable for any 0 <= a <= 1.
    """
    parts = []
    for first in range(0, a.shape[1], SCAN_CHUNK):
        factor, total = a[:, first : first + SCAN_CHUNK], b[:, first : first + SCAN_CHUNK].clone()
        total[:, 0] += factor[:, 0] * state
        step = 1
        while step < total.shape[1]:
            total = torch.cat(
                (total[:, :step], total[:, step:] + factor[:, step:] * total[:, :-step]), 1
            )
            factor = torch.cat((factor[:, :step], factor[:, step:] * factor[:, :-step]), 1)
            step *= 2
        parts.append(total)
        state = total[:, -1]
    return torch.cat(parts, 1), state


def decayed_sum(log_BLC: Tensor, added_BLC: Tensor, state_BC: Tensor) -> tuple[Tensor, Tensor]:
    """h = exp(log) h + added, a number a channel: [B, L, C] and the state."""
    return linear_scan(torch.exp(log_BLC), added_BLC, state_BC)


def decayed_max(log_BLH: Tensor, x_BLH: Tensor, state_BH: Tensor) -> tuple[Tensor, Tensor]:
    """h = max(log + h, x), a number a head: [B, L, H] and the state."""
    parts = []
    for first in range(0, x_BLH.shape[1], MATRIX_CHUNK):
        part = slice(first, first + MATRIX_CHUNK)
        sums = log_BLH[:, part].cumsum(1)
        best = torch.cummax(x_BLH[:, part] - sums, 1)[0]
        parts.append(sums + torch.maximum(best, state_BH[:, None]))
        state_BH = parts[-1][:, -1]
    return torch.cat(parts, 1), state_BH


def fading_mean(
    key_BLC: Tensor, value_BLC: Tensor, first_C: Tensor, fade_C: Tensor, state_B3C: Tensor
) -> tuple[Tensor, Tensor]:
    """RWKV 4: means of the values so far, weighted by exp(key + fade * their age); the newest has
    ``first`` added to its key. [B, L, C] and the state: the sums of weighted values and of weights,
    both over exp of the third number."""
    parts = []
    for first in range(0, key_BLC.shape[1], SCAN_CHUNK):
        part = slice(first, first + SCAN_CHUNK)
        y, state_B3C = _mean_of_chunk(
            key_BLC[:, part], value_BLC[:, part], first_C, fade_C, state_B3C
        )
        parts.append(y)
    return torch.cat(parts, 1), state_B3C


def _mean_of_chunk(
    key: Tensor, value: Tensor, first_C: Tensor, fade_C: Tensor, state_B3C: Tensor
) -> tuple[Tensor, Tensor]:
    count, (sums_before, weight, exponent) = key.shape[1], state_B3C.unbind(1)
    none = float("-inf")
    places = torch.arange(count + 1, device=key.device)
    # weights before place m: token j has exp(key + (m - 1 - j) * fade), the sums before have m
    # times the fade
    ago = places[:, None] - 1 - places[:-1]
    terms = key[:, None] + ago[None, :, :, None] * fade_C  # [B, M + 1, M, C]
    terms = terms.masked_fill((ago < 0)[None, :, :, None], none)
    carried = exponent[:, None] + places[None, :, None] * fade_C  # [B, M + 1, C]
    current = torch.cat((key + first_C, torch.full_like(key[:, :1], none)), 1)
    largest = torch.maximum(torch.maximum(terms.amax(2), carried), current)
    shares = torch.exp(terms - largest[:, :, None])
    kept, new = torch.exp(carried - largest), torch.exp(current - largest)
    padded = torch.cat((value, torch.zeros_like(value[:, :1])), 1)
    sums = (shares * value[:, None]).sum(2) + kept * sums_before[:, None] + new * padded
    weights = shares.sum(2) + kept * weight[:, None] + new
    y = sums[:, :-1] / weights[:, :-1]
    return y, torch.stack((sums[:, -1], weights[:, -1], largest[:, -1]), 1)


def selective_scan(
    x_BLC: Tensor, dt_BLC: Tensor, a_CN: Tensor, b_BLN: Tensor, c_BLN: Tensor, state_BCN: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba: h = exp(dt a) h + dt x b; y = h c. [B, L, C] and the state."""
    out = []
    for first in range(0, x_BLC.shape[1], SCAN_CHUNK):
        part = slice(first, first + SCAN_CHUNK)
        decay = torch.exp(dt_BLC[:, part, :, None] * a_CN)
        added = (dt_BLC[:, part] * x_BLC[:, part])[..., None] * b_BLN[:, part, None]
        h_BLCN, state_BCN = linear_scan(decay, added, state_BCN)
        out.append((h_BLCN * c_BLN[:, part, None]).sum(-1))
    return torch.cat(out, 1), state_BCN


def decayed_attention(
    x_BLHP: Tensor, log_BLH: Tensor, b_BLHN: Tensor, c_BLHN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """h = exp(log) h + x b^T; y = h c, a matrix a head: [B, L, H, P] and the state.

    Mamba 2's scan, and linear attention with x for values, b for keys, c for queries.
    """
    out = []
    for first in range(0, x_BLHP.shape[1], MATRIX_CHUNK):
        part = slice(first, first + MATRIX_CHUNK)
        x, b, c = (t[:, part].transpose(1, 2) for t in (x_BLHP, b_BLHN, c_BLHN))
        sums_BHL = log_BLH[:, part].transpose(1, 2).cumsum(-1)
        inside = torch.exp(_below(sums_BHL[..., :, None] - sums_BHL[..., None, :]))
        y = ((c @ b.transpose(-1, -2)) * inside) @ x
        y = y + (c * torch.exp(sums_BHL)[..., None]) @ state_BHPN.transpose(-1, -2)
        last = sums_BHL[..., -1:]
        kept = b * torch.exp(last - sums_BHL)[..., None]
        state_BHPN = state_BHPN * torch.exp(last)[..., None] + x.transpose(-1, -2) @ kept
        out.append(y.transpose(1, 2))
    return torch.cat(out, 1), state_BHPN


def _below(difference: Tensor) -> Tensor:
    """Minus infinity above the diagonal: the causal mask."""
    size = difference.shape[-1]
    ahead = torch.ones(size, size, dtype=torch.bool, device=difference.device).triu(1)
    return difference.masked_fill(ahead, float("-inf"))


def delta_rule(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHP: Tensor,
    log_BLHK: Tensor,
    beta_BLH: Tensor,
    state_BHKP: Tensor,
) -> tuple[Tensor, Tensor]:
    """h = exp(log) h; h += k beta (v - k h)^T; y = q h: [B, L, H, P] and the state.

    ``log`` has one number a head ([..., 1]) or one a key channel. In a chunk the corrections solve
    a triangular system (arXiv:2412.06464, arXiv:2510.26692).
    """
    step = MATRIX_CHUNK if log_BLHK.shape[-1] == 1 else CHANNEL_CHUNK
    out = []
    for first in range(0, q_BLHK.shape[1], step):
        part = slice(first, first + step)
        q, k, v, log = (t[:, part].transpose(1, 2) for t in (q_BLHK, k_BLHK, v_BLHP, log_BLHK))
        beta = beta_BLH[:, part].transpose(1, 2)[..., None]
        sums = log.cumsum(-2)
        decayed = torch.exp(sums)
        among_k, among_q = _products(k, k, sums), _products(q, k, sums)
        right = beta * (v - (k * decayed) @ state_BHKP)
        system = beta * among_k
        new = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        y = (q * decayed) @ state_BHKP + among_q @ new
        kept = k * torch.exp(sums[..., -1:, :] - sums)
        state_BHKP = state_BHKP * decayed[..., -1, :, None] + kept.transpose(-1, -2) @ new
        out.append(y.transpose(1, 2))
    return torch.cat(out, 1), state_BHKP


CHANNEL_CHUNK = 16  # smaller, since there is a product of each pair of tokens for each channel


def _products(a_BHLK: Tensor, b_BHLK: Tensor, sums_BHLK: Tensor) -> Tensor:
    """a[i] . b[j] with b decayed from j to i; 0 where j is ahead of i. [B, H, L, L]"""
    if sums_BHLK.shape[-1] == 1:
        sums = sums_BHLK[..., 0]
        decay = torch.exp(_below(sums[..., :, None] - sums[..., None, :]))
        return (a_BHLK @ b_BHLK.transpose(-1, -2)) * decay
    difference = sums_BHLK[..., :, None, :] - sums_BHLK[..., None, :, :]
    masked = _below(difference.movedim(-1, -3)).movedim(-3, -1)
    return torch.einsum("bhik,bhjk,bhijk->bhij", a_BHLK, b_BHLK, torch.exp(masked))
