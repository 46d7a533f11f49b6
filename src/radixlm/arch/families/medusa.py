"""Medusa (arXiv:2401.10774): heads that read the target's last hidden state and guess one token
further each."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.draft import STEP, Draft, ResidualLayers
from radixlm.arch.families.drafts import NO_NORM
from radixlm.arch.names import AnyOf
from radixlm.arch.spec import Decoder


def medusa(c: Config) -> Draft:
    """In the authors' layout or vLLM's. A config that leaves out the sizes has ones for them."""
    count = c.get("medusa_num_heads") or c.get("num_heads", 5)
    layers = c.get("medusa_num_layers") or c.num_hidden_layers
    if (truncated := c.get("truncated_vocab_size")) not in (None, c.vocab_size):
        raise c.error("truncated_vocab_size", f"= {truncated}: a token_map is not supported")
    own = (f"{STEP}.", f"medusa_head.{STEP}.", f"medusa_heads.{STEP}.")
    names: dict[str, Any] = {
        f"draft.residual.{i}": AnyOf(
            *(f"{at}{i}.linear" for at in own), f"blocks.{STEP}.layers.{i}"
        )
        for i in range(layers)
    }
    names["head"] = AnyOf(*(f"{at}{layers}" for at in own), f"lm_heads.{STEP}")
    decoder = Decoder(c.vocab_size, c.hidden_size, (), NO_NORM, 0, names=names)
    return Draft(decoder, modules=count, is_projected=False, owns_head=True,
                 layers=ResidualLayers(layers))  # fmt: skip
