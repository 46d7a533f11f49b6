"""Architecture name of a config.json -> the family that describes it."""

from __future__ import annotations

import difflib

from radixlm.arch.families import (
    afmoe,
    alibi,
    cohere,
    composite,
    compressed,
    convolved,
    cross,
    custom,
    cycles,
    deepseek,
    drafts,
    early,
    encoded,
    encoder,
    encoder_kin,
    ernie,
    gemma,
    glm,
    gpt,
    gptj,
    granite,
    heads,
    hearing,
    hybrid,
    latents,
    linear,
    llama,
    llama4,
    longcat,
    media_layouts_llava,
    mixtral,
    mixtures,
    muse,
    olmo,
    phi,
    published,
    qwen,
    qwen4,
    rwkv,
    seeing,
    sparse,
    step,
    xlstm,
    zamba,
)
from radixlm.arch.families.builders import FAMILIES, Family, family
from radixlm.base.errors import CheckpointError

__all__ = ["FAMILIES", "LINEAGES", "UnknownArchitecture", "family", "find"]

# Naming the modules keeps the imports that register the families.
LINEAGES = (
    afmoe,
    alibi,
    cohere,
    composite,
    convolved,
    compressed,
    cross,
    custom,
    cycles,
    deepseek,
    drafts,
    early,
    encoded,
    encoder,
    encoder_kin,
    ernie,
    gemma,
    glm,
    gpt,
    gptj,
    granite,
    heads,
    hearing,
    hybrid,
    latents,
    linear,
    llama,
    llama4,
    longcat,
    media_layouts_llava,
    mixtral,
    mixtures,
    muse,
    olmo,
    phi,
    published,
    qwen,
    qwen4,
    rwkv,
    seeing,
    sparse,
    step,
    xlstm,
    zamba,
)


class UnknownArchitecture(CheckpointError):
    """No family describes the checkpoint."""


def find(architecture: str, source: str = "config.json") -> Family:
    """The family of ``architecture``; CheckpointError with the nearest names if there is none."""
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    near = difflib.get_close_matches(architecture, FAMILIES, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise UnknownArchitecture(f"{source}: unknown architecture {architecture!r}{hint}")
