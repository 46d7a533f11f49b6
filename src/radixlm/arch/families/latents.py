"""Latent attention after DeepSeek: Mistral 4."""

from __future__ import annotations

from dataclasses import replace

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family, plain
from radixlm.arch.families.deepseek import latent, routed
from radixlm.arch.spec import Decoder, Temperature


@family("Mistral4ForCausalLM")
def mistral4(c: Config) -> Decoder:
    """Queries grow with each original length of the rope; softmax routing in groups."""
    p, mixer = c.rope_parameters, latent(c, interleaved=c.rope_interleave)
    if p.get("llama_4_scaling_beta"):
        period = float(p.get("original_max_position_embeddings") or c.max_position_embeddings)
        mixer = replace(mixer, temperature=Temperature(p["llama_4_scaling_beta"], period))
    return plain(c, mixer, routed(c))
