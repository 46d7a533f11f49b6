"""TensorDump: what each layer of each step computes, in files (--debug-tensor-dump-output-folder).

It stands before a decoder whose layers then run one by one. A step is one safetensors file:

    token_ids, positions   int64 [T]
    query_start            int32 [S + 1]: the first token of each sequence in the step
    logits_rows            int64 [R]: the tokens with logits
    embed                  [T, D]: the input of the first layer
    layers.N               [T, D]: the residual stream after layer N
    layers.N.attention     [T, D]: what its mixer adds to it; layers.N.mlp the same of its MLP
    norm, logits           [T, D] after the last norm, [R, V]

Legend: T packed tokens, S sequences, R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.kernels.ops.lora import LoraRows
from radixlm.layers.block import BlockLayer
from radixlm.layers.residual import added
from radixlm.models.decoder import DecoderModel
from radixlm.step.batch import ForwardBatch

log = logging.getLogger(__name__)

PREFIX = "step-"
FORMAT = {"format": "radixlm dump 1"}


class TensorDump:
    """A decoder whose steps are written to ``folder``. ``injected``: a dump whose tensors take the
    place of each layer's input in steps of the same tokens."""

    def __init__(
        self, model: DecoderModel, folder: Path, prefill_only: bool, injected: Path | None = None
    ) -> None:
        self._model, self._folder, self._prefill_only = model, folder, prefill_only
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        last = max(folder.glob(f"{PREFIX}*.safetensors"), default=None)
        self._next = 0 if last is None else int(last.stem.removeprefix(PREFIX)) + 1
        self._injected = load_file(injected) if injected is not None else {}
        self._is_injecting = False
        self._found: dict[str, Tensor] | None = None  # of the step that runs, if it is dumped
        model.use_program = False
        for layer, block in enumerate(model.blocks):
            if isinstance(block, BlockLayer):
                self._hook(layer, block)
        log.warning("tensors of each step go to %s; layers run one by one, which is slow", folder)

    def _hook(self, layer: int, block: BlockLayer) -> None:
        """Stand before the parts of a block; attributes of an object win over methods."""
        run, before = block.run_deferred, "embed" if layer == 0 else f"layers.{layer - 1}"

        def run_deferred(
            x_TD: Tensor, pending_TD: Tensor | None, *args: Any
        ) -> tuple[Tensor, Tensor | None]:
            if layer == self._model.stage.first:
                self._keep(before, added(x_TD, pending_TD))
            if self._is_injecting and before in self._injected:
                x_TD, pending_TD = self._injected[before].to(x_TD, copy=True), None
            x_TD, pending_TD = run(x_TD, pending_TD, *args)
            if self._found is not None:  # a sum of its own, as the branch joins in the next norm
                self._keep(f"layers.{layer}", added(x_TD.clone(), pending_TD))
            return x_TD, pending_TD

        setattr(block, "run_deferred", run_deferred)  # noqa: B010  mypy forbids the plain form
        for name, part in (("_mix", "attention"), ("_feed", "mlp")):
            kept = self._kept(f"layers.{layer}.{part}", getattr(block, name))
            setattr(block, name, kept)

    def _kept(self, name: str, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            y_TD = work(*args)
            self._keep(name, y_TD)
            return y_TD

        return run

    def _keep(self, name: str, value: Tensor) -> None:
        if self._found is not None:
            self._found[name] = value.detach().to("cpu", copy=True).contiguous()

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        is_wanted = not (self._prefill_only and batch.num_tokens == batch.num_sequences)
        self._found = {} if is_wanted else None
        for name in ("token_ids", "positions", "query_start", "logits_rows"):
            suffix = {"query_start": "_S1", "logits_rows": "_R"}.get(name, "_T")
            self._keep(name, getattr(batch, name + suffix))
        known = self._injected.get("token_ids"), self._injected.get("positions")
        steps = batch.token_ids_T.cpu(), batch.positions_T.cpu()
        self._is_injecting = all(
            a is not None and torch.equal(a, b) for a, b in zip(known, steps, strict=True)
        )
        hidden_TD, logits_RV = self._model.step(batch, True)
        if hidden_TD is not None:
            self._keep("norm", hidden_TD)
        if logits_RV is not None:
            self._keep("logits", logits_RV)
        if self._found is not None:
            path = self._folder / f"{PREFIX}{self._next:06d}.safetensors"
            save_file(self._found, path, FORMAT)
            self._next, self._found = self._next + 1, None
        return (hidden_TD if need_hidden else None), logits_RV

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        return self._model.logits(hidden_RD, lora)
