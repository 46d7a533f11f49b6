"""Load the draft model of an engine: find it, check that it fits the target, fill it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from radixlm.arch.draft import Draft, taps_mean
from radixlm.arch.hf import describe, describe_draft, load_config
from radixlm.arch.quant_methods import ONLINE_FORMATS
from radixlm.arch.registry import DRAFTS, DSPARK_LAYERS, EAGLE_HEADS
from radixlm.arch.spec import Decoder
from radixlm.attention.base import AttentionBackend
from radixlm.attention.select import make_backend
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import Record, replace
from radixlm.base.units import format_bytes
from radixlm.config.server_config import ServerConfig
from radixlm.config.speculate import BLOCK_DRAFTS, HEADS
from radixlm.engine.draft_fit import (
    FLAG,
    algorithm_of,
    check_fit,
    check_map,
    check_vocabulary,
    completed,
    num_modules,
)
from radixlm.engine.drafting import tree_shape, verifies_drafts, why_chains
from radixlm.engine.model_info import ASSETS, ZOO, ModelInfo, find_model
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module, noting_contents
from radixlm.models.block_draft import BlockDraft
from radixlm.models.build import Model, build_model
from radixlm.models.decoder import DecoderModel
from radixlm.models.draft_heads import MedusaHead, StateHead
from radixlm.models.drafts import DraftModel, StandaloneDraft, needs_of
from radixlm.models.dtype import resolve_dtypes
from radixlm.models.reading_draft import ReadingDraft
from radixlm.models.shadow import Shadow
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.quant.scheme import Scheme
from radixlm.speculative.trees import TreeShape
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.folder import open_folder
from radixlm.weights.load import load_weights
from radixlm.weights.pickle_file import load_file
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)

WIDE = 512  # channels of a draft whose weights no cache holds
# the drafts of bundled models, by algorithm: what follows the model's name
_BUNDLED = {"STANDALONE": "-draft", "EAGLE": "-eagle3", "EAGLE3": "-eagle3"}


class LoadedDraft(Record, eq=False):
    """``num_ids``: target tokens from this id on are never drafted. ``attn`` gets pools of its own,
    with the pages of the target's full KV group."""

    net: DraftModel | StandaloneDraft
    attn: AttentionBackend
    num_ids: int
    num_bytes: int
    # loads the weights again, of the target's checkpoint from there, and binds them to the target's
    fill: Callable[[WeightsSource | None], int]
    # reads what it has of the target's checkpoint; what puts that in place, once the target's is
    renew: Callable[[WeightsSource], Callable[[], None]]
    # further modules, each of which drafts one token further than the one before
    later: tuple[tuple[DraftModel, AttentionBackend], ...] = ()
    tree: TreeShape | None = None  # what it drafts; None: chains
    block: TreeShape | None = None  # one branch, of the tokens of a block

    def num_branch_pages(self, page_size: int) -> int:
        """Pages of its pools besides those of the target's."""
        shape = self.tree or self.block
        return 0 if shape is None else shape.num_pages(page_size)

    @property
    def roots(self) -> list[Module]:
        """The trees of layers."""
        nets = [net for net, _ in self.modules]
        return [net.model if isinstance(net, StandaloneDraft) else net for net in nets]

    @property
    def modules(self) -> tuple[tuple[DraftModel | StandaloneDraft, AttentionBackend], ...]:
        return ((self.net, self.attn), *self.later)


def load_draft(
    config: ServerConfig,
    info: ModelInfo,
    target: Model,
    device: torch.device,
    kernels: Kernels,
    source: WeightsSource | None = None,
) -> LoadedDraft | None:
    """The draft model of --speculative-algorithm, bound to ``target``; None for none and for
    drafters on the host. ConfigError if it does not fit. ``source``: what takes the place of the
    target's checkpoint."""
    algorithm = config.speculate.speculative_algorithm
    if algorithm in (None, "NGRAM") or not verifies_drafts(config, info.decoder):
        return None
    folder = find_draft(config, info)
    net: DraftModel | StandaloneDraft
    later: list[DraftModel] = []
    if algorithm == "STANDALONE":
        net, num_bytes, fill = _load_standalone(config, info, folder, device, kernels)
        renew: Callable[[WeightsSource], Callable[[], None]] = _stay
    else:
        if not isinstance(target, DecoderModel):
            raise ConfigError(
                f"--speculative-algorithm {algorithm}: {info.architecture} runs by transformers, "
                "which shows no hidden states; STANDALONE and NGRAM work"
            )
        (net, *later), num_bytes, fill, renew = _load_head(
            config, info, target, folder, device, kernels, source
        )
    execute = config.execute
    phases = (execute.prefill_attention_backend, execute.decode_attention_backend)
    name = execute.attention_backend or "torch_native"
    attn, *others = (
        make_backend(name, one.kv_groups, kernels, device, *phases) for one in (net, *later)
    )
    log.info("drafts of %s (%s): weights %s", folder.name, algorithm, format_bytes(num_bytes))
    num_ids = min(net.decoder.vocab, info.decoder.vocab) if net.needs is None else 0
    own = tuple(zip(later, others, strict=True))
    num_ids = num_ids or info.decoder.vocab
    branches, modules = config.speculate.speculative_eagle_topk or 1, 1 + len(own)
    reason = why_chains(config, info.decoder, modules)
    block = None
    if net.mask is not None:
        reason = reason or "the draft makes all tokens in one step"
    if isinstance(net, ReadingDraft):
        reason = reason or "the draft has no keys and values of its own"
    elif isinstance(net, BlockDraft):
        reason = reason or "the draft makes a block of tokens at once"
        block = TreeShape(branches=1, size=net.block.size, depth=net.block.size)
    if branches > 1 and reason:
        log.warning("--speculative-eagle-topk %d is read as 1: %s", branches, reason)
    tree = None if reason else tree_shape(config, info.decoder, modules)
    return LoadedDraft(net, attn, num_ids, num_bytes, fill, renew, own, tree, block)


def shares_head(config: ServerConfig) -> bool:
    """Whether a drafter on rank 0 may run the target's output head, which is whole then."""
    return config.speculate.speculative_algorithm in HEADS


def tap_for_drafter(config: ServerConfig, info: ModelInfo, target: Model) -> None:
    """Leave in each step what rank 0's drafter reads: the steps of all ranks are alike."""
    if not shares_head(config) or not isinstance(target, DecoderModel):
        return
    spec = head_in(config, find_draft(config, info))
    if spec is not None:
        target.tap(needs_of(spec, target.decoder))


def find_draft(config: ServerConfig, info: ModelInfo) -> Path:
    """The folder of the draft model: --speculative-draft-model-path, else prediction layers of the
    model's own checkpoint, else the draft that is bundled with it."""
    s = config.speculate
    algorithm, path = s.speculative_algorithm or "", s.speculative_draft_model_path
    if path is not None:
        try:
            return find_model(config.local("speculative_draft_model_path"))
        except ConfigError as error:
            raise ConfigError(str(error).replace("--model-path", FLAG)) from error
    if algorithm in ("EAGLE", "NEXTN") and _predicts(config, info.folder):
        return info.folder
    may_hold = algorithm == "DSPARK" and info.architecture in DSPARK_LAYERS
    if may_hold and head_in(config, info.folder) is not None:
        return info.folder
    if info.folder.parent in (ASSETS, ZOO) and algorithm in _BUNDLED:
        name = info.folder.name + _BUNDLED[algorithm]
        for root in (ASSETS, ZOO):
            if (root / name / "config.json").is_file():
                return root / name
    kind = "draft model" if algorithm == "STANDALONE" else "head"
    has_none = f"{info.folder} has no prediction layers of its own, "
    raise ConfigError(
        f"--speculative-algorithm {algorithm}: "
        f"{has_none if algorithm in ('EAGLE', 'NEXTN') else ''}"
        f"name the folder of a {kind} for this model with {FLAG}; NGRAM works without"
    )


def _predicts(config: ServerConfig, folder: Path) -> bool:
    """Whether a model's checkpoint has prediction layers, which its config alone may not say."""
    spec = describe_draft(folder)
    if spec is None or _load_format(config) == "dummy":
        return spec is not None
    return num_modules(spec, _tensors(config, folder)) > 0


def head_in(config: ServerConfig, folder: Path) -> Draft | None:
    """The head in a folder; None if it holds a model."""
    c = load_config(folder)
    layers = DSPARK_LAYERS.get(c.architecture)
    if layers is not None and config.speculate.speculative_algorithm == "DSPARK":
        return describe_draft(c.replace(architecture=layers)) if "dspark_markov_rank" in c else None
    head = EAGLE_HEADS.get(c.architecture)
    if head is not None and _load_format(config) != "dummy":
        if {"fc.weight", "model.fc.weight"} & _tensors(config, folder):
            c = c.replace(architecture=head)
    return describe_draft(c)


def _tensors(config: ServerConfig, folder: Path) -> frozenset[str]:
    """Names of the tensors in the files of a folder."""
    return frozenset(open_folder(folder, _load_format(config)).sizes())


def _load_standalone(
    config: ServerConfig, info: ModelInfo, folder: Path, device: torch.device, kernels: Kernels
) -> tuple[StandaloneDraft, int, Callable[[WeightsSource | None], int]]:
    c = load_config(folder)
    if c.architecture in DRAFTS:
        raise ConfigError(
            f"--speculative-algorithm STANDALONE: {folder} holds a head ({c.architecture}), which "
            f"cannot draft by itself; {algorithm_of(describe_draft(c))} works"
        )
    decoder = describe(c)
    has_states = any(block.state is not None for block in decoder.blocks)
    if decoder.pool is not None or decoder.encoder is not None or has_states:
        why = "has recurrent layers" if has_states else "does not generate text"
        raise ConfigError(
            f"{FLAG} {folder}: {c.architecture} {why}; a model with attention works that writes "
            "text"
        )
    check_vocabulary(config, info, folder, decoder)
    mask = c.get("pard_token")  # of a model that makes all drafts in one step
    if mask is not None and not (isinstance(mask, int) and 0 <= mask < decoder.vocab):
        raise c.error("pard_token", f"= {mask!r} must be a token below {decoder.vocab}")
    compute, weight = _dtypes(config, device, folder)
    model = build_model(
        decoder, device, compute, kernels, weight_dtype=weight, merge_windows=True,
        scheme=_scheme(config, folder, decoder.dim, kernels),
    )  # fmt: skip
    assert isinstance(model, DecoderModel)

    def fill(source: WeightsSource | None) -> int:
        return load_weights(model, folder, _load_format(config), device=device).num_bytes

    with noting_contents(model):
        num_bytes = fill(None)
    return StandaloneDraft(model, mask), num_bytes, fill


def _load_head(
    config: ServerConfig,
    info: ModelInfo,
    target: DecoderModel,
    folder: Path,
    device: torch.device,
    kernels: Kernels,
    source: WeightsSource | None,
) -> tuple[
    list[DraftModel],
    int,
    Callable[[WeightsSource | None], int],
    Callable[[WeightsSource], Callable[[], None]],
]:
    spec = _describe_head(config, info, target, folder)
    compute, weight = _dtypes(config, device, folder)
    context = LayerContext(
        kernels, device, compute, _scheme(config, folder, spec.decoder.dim, kernels)
    )
    kind = _kind_of(spec)
    nets = [kind(spec, context, weight, number) for number in range(spec.modules)]
    # a checkpoint of DSpark layers may hold their target as well
    is_part = folder == info.folder or len(nets) > 1 or taps_mean(spec)
    kept = kept_ids(config, spec, target.decoder, device)

    leaves = partial(_leaves, is_part)

    def fill(source: WeightsSource | None) -> int:
        num_bytes, stored = 0, WeightsSource(str(folder), _load_format(config))
        own = source if source is not None and folder == info.folder else stored
        for net in nets:
            report = load_weights(
                net, own.folder, own.load_format, device=device, leaves=leaves,
                deltas=tuple(map(Path, own.deltas)),
            )  # fmt: skip
            num_bytes += report.num_bytes
            net.bind(target, kept)
        return num_bytes

    renew = partial(_renew_head, nets, target, kept, leaves if folder == info.folder else None)
    with ExitStack() as notes:
        for net in nets:
            notes.enter_context(noting_contents(net))
        num_bytes = fill(source)
    check_map(nets[0], folder, target.decoder.vocab)
    target.tap(nets[0].needs)
    return nets, num_bytes, fill, renew


def _kind_of(spec: Draft) -> type[DraftModel]:
    if spec.reads_target:
        return ReadingDraft
    if spec.layers is not None:
        return MedusaHead
    if spec.state is not None:
        return StateHead
    return DraftModel if spec.block is None else BlockDraft


def _describe_head(
    config: ServerConfig, info: ModelInfo, target: DecoderModel, folder: Path
) -> Draft:
    """ConfigError where the folder holds no head, or one of another kind or for another model."""
    algorithm = config.speculate.speculative_algorithm
    spec = head_in(config, folder)
    if spec is None:
        raise ConfigError(
            f"{FLAG} {folder}: holds a model, not a head; --speculative-algorithm STANDALONE works"
        )
    own, strict = algorithm_of(spec), {*BLOCK_DRAFTS, "MEDUSA", "MLP_SPECULATOR"}
    if own != algorithm and (algorithm == "EAGLE3" or {own, algorithm} & strict):
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: {folder} holds a head of kind {own}; {own} works"
        )
    if own == "EAGLE3" != algorithm:
        log.warning("%s holds an EAGLE3 head: it is used as one, not as %s", folder, algorithm)
    if spec.layers is not None and spec.decoder.dim == 1:  # the config tells no sizes
        sizes = {"dim": target.decoder.dim, "vocab": target.decoder.vocab}
        spec = replace(spec, decoder=replace(spec.decoder, **sizes))
    if _load_format(config) != "dummy":
        spec = completed(spec, folder, _tensors(config, folder))
    check_fit(spec, folder, target.decoder, info.architecture)
    if spec.reads_target and config.parallel.num_processes > 1:
        raise ConfigError(
            f"{FLAG} {folder}: reads the cache of the whole model, which several ranks share; "
            "NGRAM works, or one rank"
        )
    return spec


def _leaves(is_part: bool, name: str) -> bool:
    """Whether a head leaves a tensor alone that it does not use; ``is_part``: of a checkpoint that
    holds more."""
    heads = ("lm_head.weight", "lm_heads.0.weight")
    ends = ("t2d", "d2t", "token_map", "embed_tokens.weight", *heads)
    is_unused = "confidence_head." in name or name == "verifier_norm.weight"
    return is_part or is_unused or name.endswith(ends)


def _renew_head(
    nets: Sequence[DraftModel],
    target: DecoderModel,
    kept: torch.Tensor | None,
    leaves: Callable[[str], bool] | None,
    source: WeightsSource,
) -> Callable[[], None]:
    """Bind the modules of a head to its target again; those of the target's own checkpoint, which
    leave other tensors alone (``leaves``), are read from ``source`` first."""
    shadows = [Shadow(net) for net in nets] if leaves is not None else []
    for shadow in shadows:
        assert isinstance(shadow.root, DraftModel)
        load_weights(
            shadow.root, source.folder, source.load_format, device=target.context.device,
            progress=False, leaves=leaves, deltas=tuple(map(Path, source.deltas)),
        )  # fmt: skip
    publishes = [shadow.publish() for shadow in shadows]

    def publish() -> None:
        for call in publishes:
            call()
        for net in nets:
            if not shadows and net.contents is not None and net.contents.is_dropped:
                continue  # whoever fills it binds it
            net.finish()  # forgets a program that knows the target's old table
            net.bind(target, kept)

    return publish


def _stay(source: WeightsSource) -> Callable[[], None]:
    """A model that drafts by itself has nothing of its target's."""
    return lambda: None


def kept_ids(
    config: ServerConfig, spec: Draft, target: Decoder, device: torch.device
) -> torch.Tensor | None:
    """The tokens of --speculative-token-map, to which a head is cut that it shares with the model:
    int64."""
    path, flag = config.local("speculative_token_map"), "--speculative-token-map"
    if path is None:
        return None
    if spec.owns_head or spec.block or target.head_bias:
        log.info("%s has no effect on this draft", flag)
        return None
    try:
        ids = torch.as_tensor(load_file(Path(path))).long().flatten()
    except (CheckpointError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{flag} {path}: not a file of torch with token ids ({why})") from error
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab:
        span = f"{int(ids.min())} to {int(ids.max())}" if len(ids) else "none"
        raise ConfigError(
            f"{flag} {path}: token ids {span}, the model has {target.vocab}; ids below that work"
        )
    return ids.to(device)


def _dtypes(
    config: ServerConfig, device: torch.device, folder: Path
) -> tuple[torch.dtype, torch.dtype | None]:
    return resolve_dtypes(config.model.dtype, device, checkpoint_dtype(folder))


def _scheme(config: ServerConfig, folder: Path, dim: int, kernels: Kernels) -> Scheme:
    """The draft's own quantization, else the one that is asked for where it has floats. Without
    any, a wide draft (``dim`` channels) gets 8 bits on a CPU: a wrong draft costs time only, and
    reading its weights is most of what a draft costs."""
    asked, stored = config.speculate.speculative_draft_model_quantization, checkpoint_quant(folder)
    if stored is not None:
        return stored.scheme()
    name = asked or config.model.quantization
    is_cpu = config.execute.device == "cpu" and kernels.copies_weights
    if name is None and is_cpu and dim >= WIDE:
        name = "int8wo"
    is_of_target = asked is None and name not in ONLINE_FORMATS  # the format of its checkpoint
    try:
        return make_scheme(None if is_of_target else name)
    except ConfigError as error:
        flag = "--speculative-draft-model-quantization"
        raise ConfigError(str(error).replace("--quantization", flag) + ", unquant") from error


def _load_format(config: ServerConfig) -> str:
    return config.speculate.speculative_draft_load_format or config.model.load_format
