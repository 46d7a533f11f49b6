"""Whether a draft fits its target, and what its files say that its config leaves out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from radixlm.arch.draft import Draft, at_step, join_role, tapped_layers
from radixlm.arch.names import spellings
from radixlm.arch.spec import Decoder
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine.located import tokenizer_folder
from radixlm.engine.model_info import ModelInfo
from radixlm.models.drafts import DraftModel
from radixlm.models.reading_draft import read_layers
from radixlm.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

FLAG = "--speculative-draft-model-path"
MIN_AGREEMENT = 0.99  # of the token texts of a draft model and its target
MAX_PADDED = 0.01  # of a vocabulary, by which two of the same tokenizer may differ


def algorithm_of(spec: Draft | None) -> str:
    if spec is not None and spec.layers is not None:
        return "MEDUSA"
    if spec is not None and spec.state is not None:
        return "MLP_SPECULATOR"
    if spec is not None and spec.block is not None:
        return "DSPARK" if spec.block.markov else "DFLASH"
    if spec is not None and not spec.is_projected:
        return "EAGLE3"
    predicts = spec is not None and (spec.embed_norm is not None or spec.reads_target)
    return "NEXTN" if predicts else "EAGLE"


def completed(spec: Draft, folder: Path, present: frozenset[str]) -> Draft:
    """A draft with the modules and the table, a head of EAGLE-3 with the parts that its files have:
    configs say too little. ConfigError if a smaller vocabulary has no map to the target's."""
    if spec.layers is not None:
        return _completed_layers(spec, folder, present)
    if spec.state is not None:
        _modules_of(spec, folder, present, "draft.project", "n_predict")
        return spec
    if spec.is_projected:
        num = num_modules(spec, present)
        table = spellings(spec.decoder.names, "embed")[0].templates[0].removeprefix("model.")
        has_table = any(name.endswith(f".{table}.weight") for name in present)
        return replace(spec, modules=num or spec.modules, owns_table=spec.owns_table and has_table)
    if spec.has_vocab_map and "d2t" not in present:
        raise ConfigError(
            f"{FLAG} {folder}: its head has {spec.decoder.vocab} tokens and no tensor 'd2t' that "
            "says which tokens of the model they are; a checkpoint with d2t works"
        )
    has_head = any(name.endswith("lm_head.weight") for name in present)
    if spec.has_vocab_map and not has_head:
        raise ConfigError(f"{FLAG} {folder}: a smaller vocabulary needs a tensor 'lm_head.weight'")
    if spec.block is not None:
        return spec
    if spec.mask is not None and "mask_hidden" not in present:
        raise ConfigError(
            f"{FLAG} {folder}: has no tensor 'mask_hidden', which it reads in place of the hidden "
            "states of tokens that it drafts at once; a checkpoint with it works"
        )
    has_table = any(name.endswith("embed_tokens.weight") for name in present)
    return replace(
        spec, has_vocab_map="d2t" in present and has_head, owns_head=has_head,
        owns_table=spec.owns_table and has_table,
    )  # fmt: skip


def _completed_layers(spec: Draft, folder: Path, present: frozenset[str]) -> Draft:
    """Modules with the biases and heads that their files have; without heads, or with one for all,
    they use the target's."""
    assert spec.layers is not None
    found = _modules_of(spec, folder, present, "draft.residual.0", "medusa_num_heads")
    if spec.has_vocab_map and "token_map" not in present:
        raise ConfigError(
            f"{FLAG} {folder}: its heads have {spec.decoder.vocab} tokens ('truncated_vocab_size') "
            "and no tensor 'token_map' that says which of the model's they are; a checkpoint with "
            "it works"
        )
    bias = any(name.endswith(("linear.bias", "layers.0.bias")) for name in present)
    layers = replace(spec.layers, bias=bias)
    return replace(spec, layers=layers, owns_head=all("head" in roles for roles in found))


def _modules_of(
    spec: Draft, folder: Path, present: frozenset[str], role: str, key: str
) -> list[set[str]]:
    """The roles that each module's files have. ConfigError if fewer modules have ``role`` than the
    config says under ``key``."""
    found = [_held(at_step(spec, n), present) for n in range(spec.modules)]
    count = sum(role in roles for roles in found)
    if count < spec.modules:
        raise ConfigError(
            f"{FLAG} {folder}: has {count} heads, its config.json says {spec.modules}; "
            f"{key!r}: {count} works"
        )
    return found


def _held(module: Decoder, present: frozenset[str]) -> set[str]:
    """The roles of a module that have a weight among these tensors."""
    return {
        role
        for role in module.names
        if any(f"{one.templates[0]}.weight" in present for one in spellings(module.names, role))
    }


def num_modules(spec: Draft, present: frozenset[str]) -> int:
    """Modules whose projections are among these tensors."""
    role = join_role(spec)
    joins = (spellings(at_step(spec, n).names, role) for n in range(spec.modules))
    stems = (f"{names[0].templates[0]}." for names in joins)
    return sum(any(stem in name for name in present) for stem in stems)


def check_fit(spec: Draft, folder: Path, target: Decoder, architecture: str) -> None:
    """ConfigError, with both numbers, where sizes of a head and its target differ."""
    dim = spec.decoder.dim
    sizes: list[tuple[str, int, int]] = [
        ("hidden states of {} channels", spec.target_dim or dim, target.dim)
    ]
    if not spec.owns_table:
        read = spec.target_dim if spec.reads_target else dim
        sizes.append(("token embeddings of {} channels", read, target.embed_dim or target.dim))
    block = spec.block  # what it has of each token joins the target's logits
    has_bias = block is not None and bool(block.markov or block.selector_rank)
    if (has_bias or spec.owns_head) and not spec.has_vocab_map:
        sizes.append(("a vocabulary of {} tokens", spec.decoder.vocab, target.vocab))
    padded = 0 if has_bias else MAX_PADDED * target.vocab
    if spec.target_vocab and abs(spec.target_vocab - target.vocab) > padded:
        sizes.append(("a vocabulary of {} tokens", spec.target_vocab, target.vocab))
    for what, own, others in sizes:
        if own != others:
            raise ConfigError(
                f"{FLAG} {folder}: made for a model with {what.format(own)}, {architecture} has "
                f"{others}; a head that was made for this model works"
            )
    mask = spec.mask if spec.block is None else spec.block.mask
    if mask is not None and not spec.owns_table and mask >= target.vocab:
        raise ConfigError(
            f"{FLAG} {folder}: its mask is token {mask}, {architecture} has "
            f"{target.vocab} tokens; a head that was made for this model works"
        )
    if spec.reads_target and -1 in read_layers(spec, target.blocks):
        raise ConfigError(
            f"{FLAG} {folder}: reads keys and values of another shape than those of "
            f"{architecture}; a head that was made for this model works"
        )
    count = len(target.blocks)
    layers = tapped_layers(spec, count)
    if any(not -1 <= layer < count for layer in layers):
        raise ConfigError(
            f"{FLAG} {folder}: reads the hidden states behind layers {list(layers)}, "
            f"{architecture} has {count} layers; a head that was made for this model works"
        )


def check_map(net: DraftModel, folder: Path, vocab: int) -> None:
    ids_V: Any = net.target_ids_V
    if ids_V is not None and not 0 <= int(ids_V.min()) <= int(ids_V.max()) < vocab:
        raise ConfigError(
            f"{FLAG} {folder}: d2t leads to tokens {int(ids_V.min())} to {int(ids_V.max())}, the "
            f"model has {vocab}; a head that was made for this model works"
        )


def check_vocabulary(config: ServerConfig, info: ModelInfo, folder: Path, draft: Decoder) -> None:
    """ConfigError if the tokens of the draft model have other texts than the target's."""
    try:
        path = tokenizer_folder(config, info.folder)
        ours, theirs = (load_tokenizer(one).backend for one in (path, folder))
    except (CheckpointError, ConfigError) as error:
        log.warning("the vocabulary of %s cannot be compared with the model's: %s", folder, error)
        return
    count = min(draft.vocab, info.decoder.vocab, *(b.get_vocab_size() for b in (ours, theirs)))
    same = sum(ours.id_to_token(i) == theirs.id_to_token(i) for i in range(count))
    if same < MIN_AGREEMENT * count:
        raise ConfigError(
            f"{FLAG} {folder}: only {same} of its first {count} tokens have the texts of the "
            "model's; a draft model with the same tokenizer works"
        )
