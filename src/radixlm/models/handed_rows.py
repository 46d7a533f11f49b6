"""What a stage's step program hands to the next stage, in one buffer.

Legend: T tokens, D model channels, N residual streams, L layers, P channels of a layer's input,
W all numbers of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.arch.spec import Decoder
from radixlm.layers.program import ProgramBuilder, ProgramStream, struct
from radixlm.models.stages import RESIDUAL
from radixlm.step.batch import LayerScratch

_INPUTS, _EMBEDS = "per_layer_TLP", "embeds_TD"


class HandedRows:
    """A row a token: N residual streams [D], then the inputs of all layers [L * P] and the
    embeddings [D], of models whose layers read them."""

    def __init__(self, decoder: Decoder) -> None:
        self._dim, altup, inputs = decoder.dim, decoder.altup, decoder.layer_inputs
        self._streams = 1 if altup is None else altup.streams
        width = altup.layer_dim if altup is not None else inputs.dim if inputs is not None else 0
        has_embeds = any(block.shared_block is not None for block in decoder.blocks)
        parts = {_INPUTS: len(decoder.blocks) * width, _EMBEDS: decoder.dim * has_embeds}
        self._num_layers, self._extras = len(decoder.blocks), {k: v for k, v in parts.items() if v}
        self._widths = [decoder.dim] * self._streams + list(self._extras.values())
        self.width = sum(self._widths)

    def accepts(self, carried: dict[str, Tensor]) -> bool:
        """Whether the stage before has left nothing else."""
        return carried.keys() == {RESIDUAL, *self._extras}

    def pack(self, carried: dict[str, Tensor]) -> Tensor:
        """float32 [T, W] of what the stage before has left, by name."""
        x = carried[RESIDUAL]
        if len(self._widths) == 1:
            return x
        streams = [x] if self._streams == 1 else list(x)
        return torch.cat([*streams, *(carried[name].flatten(1) for name in self._extras)], -1)

    def unpack(self, rows_TW: Tensor, scratch: LayerScratch) -> Tensor:
        """The residual stream [T, D], or streams [N, T, D]; the scratch gets the rest."""
        if len(self._widths) == 1:
            return rows_TW
        parts = torch.split(rows_TW, self._widths, -1)
        for name, part in zip(self._extras, parts[self._streams :], strict=True):
            shape = (-1, self._num_layers, part.shape[1] // self._num_layers)
            setattr(scratch, name, part.reshape(shape) if name == _INPUTS else part.contiguous())
        return parts[0].contiguous() if self._streams == 1 else torch.stack(parts[: self._streams])

    def emit_hand_on(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """The rows as the step's hidden states."""
        program.hidden_dim = self.width
        places = [stream.residual, *stream.others]
        if len(self._widths) == 1:
            program.ops.hidden(x=places[0], dim=self._dim)
            return
        named = {_INPUTS: program.layer_inputs, _EMBEDS: program.buffer("embeddings")}
        places += [named[name] for name in self._extras]
        rows, offset = program.buffer("handed on", self.width), 0
        for place, width in zip(places, self._widths, strict=True):
            program.ops.copy(x=place, y=rows, dim=width, y_offset=offset)
            offset += width
        program.ops.hidden(x=rows, dim=self.width)

    def emit_take(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """The rows of the stage before, in the buffers that layers read."""
        stream.others = [program.buffer(f"stream {n}") for n in range(self._streams - 1)]
        is_plain = len(self._widths) == 1
        rows = stream.residual if is_plain else program.buffer("handed on", self.width)
        # a table without rows gives zeros, which the rows of the stage before replace
        nothing = struct("EmbedArgs", table=0, vocab=0, dim=self.width)
        program.ops.embed(y=rows, tied=None, args=nothing, replaced=True)
        if is_plain:
            return
        places, offset = [stream.residual, *stream.others], 0
        if width := self._extras.get(_INPUTS):
            program.layer_inputs = program.buffer("inputs", width)
            places.append(program.layer_inputs)
        if _EMBEDS in self._extras:
            places.append(program.buffer("embeddings"))
        for place, width in zip(places, self._widths, strict=True):
            index = program.hold(torch.arange(offset, offset + width, dtype=torch.int32))
            program.ops.columns(x=rows, y=place, index=index, dim=width, selected=False)
            offset += width
