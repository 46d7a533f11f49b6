"""``radixlm calibrate double-sparsity MODEL --text FILE -o FILE``: which channels of queries and
keys are heavy on a text, for ``--enable-double-sparsity`` (arXiv:2408.07092). The file lists each
KV head's channels, the heaviest first, by q, by k and by the product of both.

Legend: T tokens, H query heads, K KV heads, C channels of a head.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from radixlm.attention.double_sparsity import is_plain
from radixlm.base.errors import ConfigError, reason
from radixlm.config.server_config import ServerConfig
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.load_model import load_model
from radixlm.engine.model_info import read_model
from radixlm.kernels.dispatch import bind
from radixlm.models.transformers_backend.trial import GrowingCache
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch
from radixlm.text.tokenizer import load_tokenizer

Weights = dict[str, Tensor]  # "q", "k" or "qk" -> float64 [K, C]


def build_parser() -> VerbParser:
    """The options of the verb."""
    parser = VerbParser("radixlm calibrate", __doc__)
    parser.add_argument("what", choices=["double-sparsity"], help="what the file is for")
    parser.add_argument("model", metavar="MODEL", help="folder or name of a checkpoint")
    parser.add_argument("--text", required=True, metavar="FILE", help="a text in UTF-8")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a JSON file")
    for flag, count, what in (
        ("--max-tokens", 16_384, "read so many tokens at most"),
        ("--length", 2048, "tokens that are read together"),
    ):
        text = f"{what} (default: %(default)s)"
        parser.add_argument(flag, type=int, default=count, metavar="N", help=text)
    return parser


def main(argv: list[str]) -> int:
    """0 once the file is written."""
    args = build_parser().parse_args(argv)
    if args.max_tokens < 1 or args.length < 1:
        raise ConfigError("--max-tokens and --length: use 1 or more")
    try:
        text = Path(args.text).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: {reason(error)}") from error
    listed = calibrate(args.model, text, args.max_tokens, args.length)
    try:
        Path(args.output).expanduser().write_text(json.dumps(listed))
    except OSError as error:
        raise ConfigError(f"-o {args.output}: {reason(error)}") from error
    print(f"written to {args.output}; serve with: radixlm serve --model-path {args.model}")
    print(f"  --enable-double-sparsity --ds-channel-config-path {args.output}")
    return 0


class _Watched(GrowingCache):
    """Attention that adds up how large channels are."""

    def __init__(self, groups: tuple[KvGroup, ...], sums: dict[int, Weights]) -> None:
        super().__init__()
        self._groups, self._sums = groups, sums

    def run(
        self, q_THC: Tensor, k_TKC: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        if k_TKC is not None and is_plain(site):
            k = k_TKC.double().abs()
            q = q_THC.double().abs().view(len(k), site.kv_heads, -1, site.head_dim).mean(2)
            sums = self._sums[self._groups[site.group].layers[site.layer]]
            for kind, part in (("q", q), ("k", k), ("qk", q * k)):
                sums[kind] = sums.get(kind, 0) + part.sum(0)
        return super().run(q_THC, k_TKC, v_TKV, site)


@torch.inference_mode()
def calibrate(model_path: str, text: str, max_tokens: int, length: int) -> dict[str, object]:
    """What the file holds. ConfigError: an empty text, or a model without a layer that could be
    sparse."""
    config = ServerConfig.from_kwargs(model_path=model_path)
    info, _ = read_model(config)
    ids = load_tokenizer(info.folder).encode(text)[:max_tokens]
    if not ids:
        raise ConfigError("--text: holds no token")
    model, _ = load_model(config, info, torch.device("cpu"), bind("cpu"))
    sums: dict[int, Weights] = defaultdict(dict)
    pieces = torch.split(torch.tensor(ids), min(length, info.context_len))
    with tqdm(total=len(ids), desc="calibrating", unit="token", disable=None) as bar:
        for piece in pieces:
            model.forward(_batch(piece, _Watched(model.kv_groups, sums)))
            bar.update(len(piece))
    if not sums:
        raise ConfigError(f"{model_path}: no layer attends to all tokens by keys of its own")
    return {
        f"model.layers.{layer}.self_attn.{kind}_proj": total.argsort(
            dim=1, descending=True, stable=True
        ).tolist()
        for layer, weights in sorted(sums.items())
        for kind, total in weights.items()
    }


def _batch(ids_T: Tensor, attn: _Watched) -> ForwardBatch:
    """A whole sequence in one step."""
    count = len(ids_T)
    return ForwardBatch(
        token_ids_T=ids_T,
        positions_T=torch.arange(count),
        rope_len_T=torch.full((count,), count),
        query_start_S1=torch.tensor([0, count], dtype=torch.int32),
        kv_len_S=torch.tensor([count], dtype=torch.int32),
        page_table_GSP=(),
        store_GT=(),
        logits_rows_R=torch.arange(1),
        attn=attn,
        max_query_len=count,
        max_kv_len=count,
    )
