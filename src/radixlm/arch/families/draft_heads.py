"""Heads without keys and values that guess one token further each: Medusa (arXiv:2401.10774), whose
heads all read the target's last hidden state, and MLP speculators (arXiv:2404.19124)."""

from __future__ import annotations

import math
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.draft import STEP, Draft, ResidualLayers, TokenState
from radixlm.arch.families.drafts import NO_NORM
from radixlm.arch.names import AnyOf, Named
from radixlm.arch.recipes import offsets
from radixlm.arch.spec import Decoder


def medusa(c: Config) -> Draft:
    """In the authors' layout or vLLM's, whose heads may know the tokens of a ``token_map`` alone. A
    config that leaves out the sizes has ones for them."""
    count = c.get("medusa_num_heads") or c.get("num_heads", 5)
    layers = c.get("medusa_num_layers") or c.num_hidden_layers
    kept = c.get("truncated_vocab_size") or c.vocab_size
    if not 0 < kept <= c.vocab_size:
        raise c.error("truncated_vocab_size", f"= {kept} must be in 1 to {c.vocab_size}")
    own = (f"{STEP}.", f"medusa_head.{STEP}.", f"medusa_heads.{STEP}.")
    names: dict[str, Any] = {
        f"draft.residual.{i}": AnyOf(
            *(f"{at}{i}.linear" for at in own), f"blocks.{STEP}.layers.{i}"
        )
        for i in range(layers)
    }
    names["head"] = AnyOf(*(f"{at}{layers}" for at in own), f"lm_heads.{STEP}")
    names["draft.vocab"] = Named(("token_map",), offsets)
    is_cut = kept < c.vocab_size
    decoder = Decoder(kept, c.hidden_size, (), NO_NORM, 0, names=names)
    return Draft(decoder, modules=count, is_projected=False, owns_head=True,
                 layers=ResidualLayers(layers), has_vocab_map=is_cut,
                 target_vocab=c.vocab_size if is_cut else 0)  # fmt: skip


def mlp_speculator(c: Config) -> Draft:
    """With ``tie_weights`` the modules share all but the first projection."""
    dim, width, count = c.hidden_size, c.get("inner_dim") or c.hidden_size, c.get("n_predict", 3)
    is_tied = c.get("tie_weights", c.get("tie_wts", False))
    first = {"emb": 0, "head": 0, "ln": 0, "proj": 1}

    def named(part: str) -> AnyOf:
        numbers = (STEP, str(first[part])) if is_tied else (STEP,)
        return AnyOf(*(f"{at}{part}.{n}" for n in numbers for at in ("speculator.", "")))

    roles = {"embed": "emb", "head": "head", "draft.project": "proj", "draft.state_norm": "ln"}
    names: dict[str, Any] = {role: named(part) for role, part in roles.items()}
    # the state's weight is such that half of the last one is of the first one
    state_weight = 0.5 ** (0.5 / count)
    token_weight = math.sqrt((1 - state_weight**2) * width / 2) / state_weight
    decoder = Decoder(c.vocab_size, width, (), NO_NORM, 0, names=names)
    state = TokenState(token_weight, bool(c.get("scale_input")))
    return Draft(decoder, modules=count, is_projected=False, owns_table=True, owns_head=True,
                 target_dim=dim, state=state)  # fmt: skip
