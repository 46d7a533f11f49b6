"""Any decoder of transformers on our paged cache: the model is Hugging Face's, its attention ours.

transformers calls a registered function instead of its own attention; that function stores the
step's keys and values in our pools and attends over our pages. So prefix cache, chunks, batching
and recovery work as for our own models; kernels, quantisation and speed are Hugging Face's.

Legend: T tokens of a step, R rows whose logits are wanted, D model channels, V vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.spec import Attention, Decoder
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.models.groups import kv_groups
from radixlm.step.batch import AttentionSite, ForwardBatch

log = logging.getLogger(__name__)

NAME = "radixlm_paged"


class TransformersModel:
    """What the executor asks of a model, answered by Hugging Face's."""

    def __init__(
        self, folder: Path, decoder: Decoder, device: torch.device, dtype: torch.dtype | str
    ) -> None:
        """CheckpointError if the weights do not load or the model has an attention of its own."""
        self.decoder = decoder
        self.kv_groups = kv_groups(decoder)
        self._hf = _load(folder, dtype, self._attend).to(device).eval().requires_grad_(False)
        self._body, self._head = self._hf.base_model, self._hf.get_output_embeddings()
        config = self._hf.config.get_text_config()
        self._scale = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._batch: ForwardBatch | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(p.numel() * p.element_size() for p in self._hf.parameters())

    def weight(self, name: str) -> Tensor | None:
        """A parameter by its Hugging Face name."""
        found: Tensor | None = dict(self._hf.named_parameters()).get(name)
        return found

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """As ``DecoderModel.step``."""
        hidden_TD = self.forward(batch)
        rows_R = batch.logits_rows_R
        logits_RV = self.logits(hidden_TD[rows_R]) if rows_R.shape[0] else None
        return (hidden_TD if need_hidden else None), logits_RV

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of the step's tokens: [T, D]."""
        self._batch = batch
        ids: dict[str, Tensor] = {"input_ids": batch.token_ids_T[None]}
        if batch.embeds_TD is not None and batch.embeds_mask_T is not None:
            table = self._hf.get_input_embeddings()(batch.token_ids_T)
            given = batch.embeds_TD.to(table.dtype)
            rows = torch.where(batch.embeds_mask_T[:, None], given, table)
            ids = {"inputs_embeds": rows[None]}
        try:
            made = self._body(**ids, position_ids=batch.positions_T[None], use_cache=False)
        finally:
            self._batch = None
        hidden: Tensor = made.last_hidden_state[0]
        return hidden

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 [R, V]."""
        logits: Tensor = self._head(hidden_RD.to(self._head.weight.dtype)).float() * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: q [1, heads, T, dim] -> ([1, T, heads, dim], None)."""
        assert self._batch is not None, "attention outside of a step"
        layer, dtype = getattr(module, "layer_idx", None), query.dtype
        q, k, v = (x[0].transpose(0, 1).float().contiguous() for x in (query, key, value))
        spec = self.decoder.blocks[0].attention
        assert isinstance(spec, Attention)
        wanted = (spec.heads, spec.kv_heads, spec.head_dim)
        if (q.shape[1], k.shape[1], q.shape[2]) != wanted or v.shape != k.shape or layer is None:
            raise CheckpointError(
                f"its attention layers have {q.shape[1]} heads, {k.shape[1]} of keys and "
                f"{q.shape[2]} channels, not {wanted}: this model cannot run by transformers"
            )
        sinks = others.get("s_aux")
        site = AttentionSite(
            layer=layer,
            group=0,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_dim=v.shape[2],
            scale=q.shape[2] ** -0.5 if scaling is None else scaling,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.float(),
        )
        out = self._batch.attn.run(q, k, v, site).to(dtype)
        return out.view(1, q.shape[0], q.shape[1], v.shape[2]), None


def _load(folder: Path, dtype: torch.dtype | str, attend: Any) -> Any:
    try:
        import transformers  # noqa: PLC0415  (2 s that our own models need not wait)
    except ImportError:
        raise ConfigError("--model-impl transformers needs transformers: install it") from None
    transformers.logging.set_verbosity_error()
    transformers.AttentionInterface.register(NAME, attend)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=NAME
        )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise CheckpointError(
            f"{folder}: {type(model).__name__} has an attention of its own in transformers, which "
            "cannot run on the paged cache"
        )
    return model
