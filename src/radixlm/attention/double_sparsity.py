"""Double sparsity (arXiv:2408.07092): from some length on, an output token scores all tokens by a
few channels of their keys, the heavy ones, and attends to the best of them alone. The query heads
of a KV head share what they choose, so that its rows are read once.

Prompts are dense. A token is sparse by its position, the prompt's length and the options, so that
its numbers do not depend on chunks, drafts or a second computation.

Legend: S sequences, R sparse rows of a step, N tokens of a sequence, H query heads, K KV heads, C
channels of a head, W heavy ones, V channels of a value.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, replace
from radixlm.config.execute import ExecuteConfig
from radixlm.kernels.ops.kv import quantize_int8
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

FLAG = "--ds-channel-config-path"
MAX_DIM = 512  # channels of a head
LABEL_MOST = 16383.0  # of a query's labels: sums of their products with int8 fit 32 bits


class DoubleSparsity(Record, eq=False):
    """``channels``: int32 [K, W] by layer of this rank; ``tokens``: how many a KV head is read at;
    ``threshold``: sequences of fewer tokens are dense; ``digest``: what the labels of all ranks'
    caches depend on."""

    channels: Mapping[int, Tensor]
    tokens: int
    threshold: int
    digest: str = ""

    @property
    def first_position(self) -> int:
        """Output tokens from here on are sparse."""
        return max(self.threshold - 1, self.tokens)

    def width(self, group: KvGroup) -> int:
        """Labels of a key of the group; 0 where its layers stay dense."""
        channels_KW = self.channels.get(next(iter(group.layers), -1))  # a stage may have none
        return 0 if channels_KW is None else int(channels_KW.shape[1])


class SparseStep(Record, eq=False):
    """The sparse rows of a step: int32 [R, 3] of query token, sequence and how many tokens it
    sees; uint8 [S]: whether all of a sequence's are sparse; the most that one sees."""

    rows: Tensor
    is_sparse: Tensor
    max_len: int


def is_plain(site: AttentionSite) -> bool:
    """Whether a layer sees all tokens alike, so that a choice among them may stand for them."""
    return not (site.window or site.chunk or site.latent or site.slopes is not None)


def sparse_step(batch: ForwardBatch, sparsity: DoubleSparsity) -> SparseStep | None:
    """None where the step has no sparse row."""
    if batch.max_kv_len <= sparsity.first_position:
        return None
    count_S = batch.count_outputs(sparsity.first_position)
    if not count_S.any():
        return None
    starts_S1, kv_len_S = batch.query_start_S1.cpu().numpy(), batch.kv_len_S.cpu().numpy()
    queries_S = np.diff(starts_S1)
    seq_R = np.repeat(np.arange(len(count_S)), count_S)
    from_end_R = np.cumsum(count_S)[seq_R] - np.arange(len(seq_R)) - 1
    columns = (starts_S1[1:][seq_R] - 1 - from_end_R, seq_R, kv_len_S[seq_R] - from_end_R)
    rows = torch.from_numpy(np.stack(columns, 1).astype(np.int32))
    is_sparse = torch.from_numpy(((count_S == queries_S) & (count_S > 0)).astype(np.uint8))
    return SparseStep(rows, is_sparse, int(rows[:, 2].max()))


def load_sparsity(
    execute: ExecuteConfig,
    groups: Iterable[KvGroup],
    heads: Mapping[int, tuple[int, int, int]],
) -> DoubleSparsity | None:
    """What the options ask for, for the attention layers of a rank's groups; None without
    --enable-double-sparsity. ``heads``: of each of the model's layers that may be sparse, on any
    rank, how many KV heads it has on all of them, the first of this rank's and the one behind them.
    ConfigError for a file that does not fit the model."""
    if not execute.enable_double_sparsity:
        return None
    if execute.ds_channel_config_path is None:
        raise ConfigError(
            f"--enable-double-sparsity needs {FLAG} FILE: "
            "`radixlm calibrate double-sparsity MODEL --text FILE -o FILE` writes one"
        )
    if not heads:
        raise ConfigError(
            "--enable-double-sparsity: the model has no layer that attends to all tokens alike "
            "(windows and indexes read few tokens, latents have few channels); leave the flag out"
        )
    path, kind = execute.ds_channel_config_path, execute.ds_heavy_channel_type
    wanted, listed = (path, kind, execute.ds_heavy_channel_num), _read_json(path)
    channels: dict[int, Tensor] = {}
    for group in groups:
        if not any(layer in heads for layer in group.layers):
            continue
        for layer in group.layers:
            if (own := heads.get(layer)) is None:  # nobody reads what its pool keeps of it
                channels[layer] = torch.arange(wanted[2]).int().repeat(group.kv_heads, 1)
                continue
            count, begin, end = own
            whole = replace(group, kv_heads=count)
            channels[layer] = heavy_channels(listed, layer, whole, wanted)[begin:end].contiguous()
    digest = sha256(json.dumps([listed, *wanted[1:]]).encode()).hexdigest()[:16]
    return DoubleSparsity(
        channels, execute.ds_heavy_token_num, execute.ds_sparse_decode_threshold, digest
    )


def _read_json(path: str) -> dict[str, object]:
    try:
        listed = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error
    if not isinstance(listed, dict):
        raise ConfigError(f"{FLAG} {path}: expected a JSON object of lists of channels by layer")
    return listed


def heavy_channels(
    listed: Mapping[str, object], layer: int, group: KvGroup, wanted: tuple[str, str, int]
) -> Tensor:
    """The first channels of a layer's lists: int32 [K, W]. ``wanted``: path, kind and W. A file may
    have a list for each KV head, or for each query head: those of a group are then joined by their
    places in the lists."""
    path, kind, count = wanted
    key = f"model.layers.{layer}.self_attn.{kind}_proj"
    if key not in listed:
        raise ConfigError(f"{FLAG} {path}: no {key!r}; --ds-heavy-channel-type names what it has")
    try:
        ids = torch.tensor(listed[key], dtype=torch.int64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: {key}: expected lists of equal length") from error
    heads = group.kv_heads
    if ids.ndim != 2 or ids.shape[0] % heads or ids.shape[1] < count:
        raise ConfigError(
            f"{FLAG} {path}: {key}: lists {tuple(ids.shape)} for {heads} KV heads and "
            f"--ds-heavy-channel-num {count}"
        )
    dim = group.head_dim
    if dim > MAX_DIM or ids.min() < 0 or ids.max() >= dim:
        raise ConfigError(f"{FLAG} {path}: {key}: channels of a head are 0 to {dim - 1}")
    place_HC = torch.full((ids.shape[0], dim), dim).scatter_(
        1, ids, torch.arange(ids.shape[1]).expand_as(ids)
    )
    order = place_HC.view(heads, -1, dim).sum(1).sort(dim=1, stable=True)[1]
    return order[:, :count].int().contiguous()


def attend_sparse(
    q_HC: Tensor, k_NKC: Tensor, v_NKV: Tensor, channels_KW: Tensor, tokens: int,
    site: AttentionSite,
) -> Tensor:  # fmt: skip
    """One sparse row in plain torch: float32 [H, V]."""
    chosen_KN = chosen_tokens(q_HC, k_NKC, channels_KW, tokens)
    q_KGC = q_HC.float().view(site.kv_heads, -1, q_HC.shape[1])
    scores = (q_KGC @ k_NKC.float().permute(1, 2, 0)) * site.scale
    if site.softcap:
        scores = torch.tanh(scores / site.softcap) * site.softcap
    scores = scores.masked_fill(~chosen_KN[:, None], -torch.inf).flatten(0, 1)
    if site.sinks is not None:
        scores = torch.cat((scores, site.sinks.float()[:, None]), 1)
    weights = scores.softmax(-1)[:, : len(k_NKC)].view(*q_KGC.shape[:2], -1)
    return (weights @ v_NKV.float().transpose(0, 1)).flatten(0, 1)


def chosen_tokens(q_HC: Tensor, k_NKC: Tensor, channels_KW: Tensor, tokens: int) -> Tensor:
    """bool [K, N]: the tokens with the best approximate scores, of equal ones the earlier. A
    token's is the largest that a query head of the KV head gives it, in units of the head's
    largest label."""
    channels = channels_KW.long()
    labels_NKW, scale_NK = quantize_int8(
        k_NKC.float().gather(2, channels.expand(len(k_NKC), -1, -1))
    )
    group = len(q_HC) // len(channels)
    q_HW = q_HC.float().gather(1, channels.repeat_interleave(group, 0))
    scale_H1 = q_HW.abs().amax(1, keepdim=True) / LABEL_MOST
    q_HW = torch.where(scale_H1 > 0, q_HW / scale_H1, 0.0).round()
    # float64 holds the sums of integers exactly
    sums_KGN = q_HW.double().view(len(channels), group, -1) @ labels_NKW.double().permute(1, 2, 0)
    scores_KN = sums_KGN.amax(1).float() * scale_NK.T
    order = torch.sort(scores_KN, dim=1, descending=True, stable=True)[1]
    chosen = torch.zeros_like(scores_KN, dtype=torch.bool)
    return chosen.scatter_(1, order[:, :tokens], True)
