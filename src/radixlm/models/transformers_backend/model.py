"""Any decoder of transformers on the paged cache: a Hugging Face model with paged attention and, on
a CPU, with the linear layers, norms and embeddings of this package.

transformers calls a registered function instead of its own attention; that function stores the
step's keys and values in the pools and attends over the pages. So prefix cache, chunked prefill,
batching and recovery work as for native models. A trial at start refuses models that need more.

Legend: T tokens of a step, R rows whose logits are wanted, D model channels, V vocabulary.
"""

import itertools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.json_file import read_object
from radixlm.arch.spec import Decoder
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import require_transformers, transformers_loading
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.lora import LoraRows
from radixlm.models.kv_groups import kv_groups
from radixlm.models.transformers_backend import trial
from radixlm.models.transformers_backend.calls import remove_overhead
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report
from radixlm.models.transformers_backend.layers import Packed, Part, replace_layers
from radixlm.step.batch import AttentionSite, ForwardBatch
from radixlm.weights.folder import open_folder

log = logging.getLogger(__name__)

_NUMBERS = itertools.count()


class TransformersModel:
    """A Hugging Face model with the interface of ``DecoderModel``. Each rank has all of it; with
    ``attention_groups`` it runs on the tokens of its group alone."""

    pipeline = taps = None
    attention_groups: AttentionGroups | None = None

    def __init__(
        self,
        folder: Path,
        decoder: Decoder,
        device: torch.device,
        dtype: torch.dtype | str,
        kernels: Kernels,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """``overrides``: of keys of config.json. CheckpointError if the weights do not load, or if
        the model keeps more than keys and values from one token to the next."""
        name = f"radixlm_paged_{next(_NUMBERS)}"  # one for each model: its attention is a method
        self._sites: tuple[AttentionSite, ...] = ()
        self._calls: list[trial.Call] = []  # of the trial's first step
        self._at = 0  # attention calls of the step so far
        self._batch: ForwardBatch | None = None
        hf = _load(folder, dtype, name, self._attend, overrides or {})
        self._hf = hf.to(device).eval().requires_grad_(False)
        config = self._hf.config.get_text_config()
        self._scale = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.num_bytes = sum(p.numel() * p.element_size() for p in self._hf.parameters())
        with trial.refused(type(self._hf).__name__), torch.inference_mode():
            self._try_out(name, decoder, device, kernels)

    def _try_out(self, name: str, decoder: Decoder, device: torch.device, kernels: Kernels) -> None:
        """Record the attention calls, replace layers, and compare with the original model."""
        hf, ids = self._hf, trial.trial_ids(decoder.vocab)
        dtype, whole = hf.dtype, torch.tensor([ids], device=device)
        hf.set_attn_implementation("eager")
        want_TV = hf(whole, use_cache=False).logits[0].float()
        if device.type == "cpu":
            replace_layers(hf, kernels)
        inner = (hf.base_model, getattr(hf, "model", hf))
        self._body = next((one for one in inner if one is not hf), hf)
        self._head = hf.get_output_embeddings()
        with _probed_masks(name):
            hf.set_attn_implementation(name)
            self._batch = next(trial.trial_batches(ids, device))
            hf(whole, position_ids=torch.arange(len(ids), device=device)[None], use_cache=False)
        if not self._calls:
            raise CheckpointError("none of its layers attends through transformers' interface")
        self.decoder, self._sites = trial.sites_of(self._calls, decoder)
        self.kv_groups = kv_groups(self.decoder)
        remove_overhead(hf, kernels, self._attend)
        for is_whole in (False, True):  # the whole model where its head is more than one map
            self._is_whole = is_whole or self._body is hf or self._head is None
            steps = [self.logits(self.forward(b)) for b in trial.trial_batches(ids, device)]
            error = trial.difference(torch.cat(steps), want_TV)
            if error <= trial.TOLERANCE.get(dtype, trial.COARSE):
                return
        raise CheckpointError(trial.MISMATCH.format(error))

    def weight(self, name: str) -> Tensor | None:
        """A parameter by its Hugging Face name."""
        path, _, last = name.rpartition(".")
        module = dict(self._hf.named_modules()).get(path)
        if isinstance(module, Packed | Part) and last == "weight":
            return module.weight
        found: Tensor | None = dict(self._hf.named_parameters()).get(name)
        return found

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD = self.forward(batch)
        rows_R = batch.logits_rows_R
        logits_RV = self.logits(hidden_TD[rows_R]) if rows_R.shape[0] else None
        return (hidden_TD if need_hidden else None), logits_RV

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of the step's tokens [T, D], or logits if the whole model runs."""
        self._batch, self._at = batch, 0
        ids: dict[str, Tensor] = {"input_ids": batch.token_ids_T[None]}
        if batch.embeds is not None and batch.embeds.mask_T is not None:
            table = self._hf.get_input_embeddings()(batch.token_ids_T)
            rows_TD = batch.embeds.rows_TD.to(table.dtype)
            rows = torch.where(batch.embeds.mask_T[:, None], rows_TD, table)
            ids = {"inputs_embeds": rows[None]}
        try:
            run = self._hf if self._is_whole else self._body
            output = run(**ids, position_ids=batch.positions_T[None], use_cache=False)
        finally:
            self._batch = None
        if self._at != len(self._sites):
            raise CheckpointError(f"{self._at} attention calls in a step, not {len(self._sites)}")
        hidden: Tensor = (output.logits if self._is_whole else output.last_hidden_state)[0]
        return hidden

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """float32 [R, V]; no adapter changes this model."""
        if self._is_whole:
            return hidden_RD.float()
        head = self._head
        x_RD = hidden_RD if isinstance(head, Packed) else hidden_RD.to(head.weight.dtype)
        logits: Tensor = head(x_RD).float() * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    stage_logits = logits

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: q [1, heads, T, dim] -> ([1, T, heads, dim], None).

        The n-th call of a step is the n-th site."""
        assert self._batch is not None, "attention outside of a step"
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        if query.dtype is not torch.float32:
            q, k, v = q.float(), k.float(), v.float()
        if not self._sites:
            return self._record(module, q, k, v, attention_mask, options).to(query.dtype), None
        if self._at >= len(self._sites):
            raise CheckpointError("more attention calls in a step than at the start")
        site = self._sites[self._at]
        self._at += 1
        out = self._batch.attn.run(q, k, v, site)
        if query.dtype is not torch.float32:
            out = out.to(query.dtype)
        return out.view(1, -1, site.heads, site.v_dim), None

    def _record(
        self,
        module: torch.nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Record a call of the trial. The result is not used."""
        shapes = (q.shape[1], k.shape[1], k.shape[2]), (q.shape[1], v.shape[1], v.shape[2])
        self._calls.append(trial.call_of(module, shapes, mask, options))
        return q.new_zeros(1, q.shape[0], q.shape[1], v.shape[2])


@contextmanager
def _probed_masks(name: str) -> Iterator[None]:
    """Within, transformers calls ``trial.mask_interface`` for masks; otherwise it makes none."""
    import transformers  # noqa: PLC0415

    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    masks.register(name, trial.mask_interface)
    try:
        yield
    finally:
        del masks._global_mapping[name]


def _config(transformers: Any, folder: Path, overrides: Mapping[str, Any]) -> Any:
    """The config of a checkpoint, read by transformers; ``overrides`` take the place of keys."""
    with tempfile.TemporaryDirectory() as place:
        if overrides:
            merged = read_object(folder / "config.json") | dict(overrides)
            folder = Path(place)
            (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(folder)


def _load(
    folder: Path, dtype: torch.dtype | str, name: str, attend: Any, overrides: Mapping[str, Any]
) -> Any:
    transformers = require_transformers("hf", "--model-impl transformers")
    transformers.AttentionInterface.register(name, attend)
    try:
        config = _config(transformers, folder, overrides)
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = known[type(config)] if type(config) in known else None
        if kind is not None and not kind._supports_attention_backend:
            raise CheckpointError(
                f"{folder}: {kind.__name__} has an attention or a state of its own in "
                "transformers, which cannot run on the paged cache"
            )
        open_folder(folder, "auto")  # its errors name file and tensor
        with transformers_loading:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=name,
                ignore_mismatched_sizes=True,  # check_report names the file
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    check_report(report, folder, "the model")
    check_numbers(model, folder, "the model")
    return model
