"""Language models behind towers that do more than to put rows in their places."""

from __future__ import annotations

from dataclasses import replace

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family
from radixlm.arch.families.composite import composite
from radixlm.arch.families.composite_newer import JOINING, joined_layers
from radixlm.arch.spec import Decoder


@family(*JOINING)
def joining(c: Config) -> Decoder:
    """A tower's rows join before many layers."""
    layers = joined_layers({key: c.get(key) for key in c})
    if not layers or not 0 <= layers[0] <= layers[-1] < c.num_hidden_layers:
        raise c.error("deepstack_layer_map", f"and spatial_target_layers name {layers or 'none'}")
    return replace(composite(c), deep_layers=tuple(layer - 1 for layer in layers if layer))
