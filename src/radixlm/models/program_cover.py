"""Whether a C++ program can say all that a loaded model does. ``plain.py`` asks the record; this
asks the layers, whose weights may be in forms that other kernels run."""

from __future__ import annotations

from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.cpu.moe import Experts
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer, ParallelHybridLayer, PerLayerInputLayer
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.linear import Linear
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.module import Module
from radixlm.layers.moe import MoeLayer
from radixlm.layers.state import HeadedMamba1Layer
from radixlm.models.program_ops import packed_of
from radixlm.models.program_states import ProgramState

Mixer = (
    AttentionLayer
    | LatentAttentionLayer
    | ExtendedAttentionLayer
    | ProgramState
    | ParallelHybridLayer
)


def experts_of(layer: MoeLayer) -> Experts | None:
    """The C++ experts of a layer; None if something else runs them."""
    return layer.experts if isinstance(layer.experts, Experts) else None


def is_block_covered(block: BlockLayer) -> bool:
    """Whether all matrices of a block are the C++ kernels'."""
    parts: list[Module] = []
    if block.mixer is not None:
        if not is_mixer_covered(block.mixer):
            return False
        parts.append(block.mixer)
    for name in ("ffn", "deferred_moe", "parallel_moe", "layer_input"):
        layer = getattr(block, name, None)
        if layer is None:
            continue
        if not isinstance(layer, MlpLayer | MoeLayer | PerLayerInputLayer):
            return False
        if isinstance(layer, MoeLayer) and experts_of(layer) is None:
            return False
        parts.append(layer)
    return all(packed_of(linear.packed) is not None for part in parts for linear in _linears(part))


def is_mixer_covered(mixer: object) -> bool:
    """Whether its kind has a writer."""
    if isinstance(mixer, ParallelHybridLayer):
        return is_mixer_covered(mixer.attention) and is_mixer_covered(mixer.state)
    if isinstance(mixer, LatentAttentionLayer):
        return all(isinstance(w, HeadLinear) for w in (mixer.kv_b.key, mixer.kv_b.value))
    if isinstance(mixer, AttentionLayer):
        return not (mixer.spec.gate and mixer.spec.qk_norm == "row")
    return isinstance(mixer, Mixer) and not isinstance(mixer, HeadedMamba1Layer)


def _linears(layer: Module) -> list[Linear]:
    found = [layer] if isinstance(layer, Linear) else []
    for _, child in layer.children():
        found += _linears(child)
    return found
