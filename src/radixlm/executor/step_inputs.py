"""StepInputs: the buffers through which the inputs of a kind of steps go to the device."""

from __future__ import annotations

import torch

from radixlm.executor.batch_builder import BatchBuilder
from radixlm.executor.device import Device, PinnedRing
from radixlm.executor.step_layout import DeviceStepBuffer, StepPacker, StepShape
from radixlm.step.batch import AttentionRunner
from radixlm.step.plan import Items

RING = 3  # host buffers for the inputs of steps, and for their results


class StepInputs:
    """Packs steps into pinned host buffers and copies them to one device buffer."""

    def __init__(
        self,
        device: Device,
        packer: StepPacker,
        spaces: tuple[int, ...],
        page_size: int,
        attn: AttentionRunner,
    ) -> None:
        self.packer, self._device = packer, device
        self._ring = PinnedRing(device, packer.num_ints, RING)
        ints = self._ring.first
        if not device.is_synchronous:
            ints = torch.zeros(packer.num_ints, dtype=torch.int32, device=device.where)
        self.buffer = DeviceStepBuffer(ints, packer)
        self.builder = BatchBuilder(packer.tables, self.buffer, spaces, page_size, attn)

    def fill(self, items: Items, num_padded: int, width: int, num_tokens: int = 0) -> StepShape:
        """Launch the copy of a step's inputs; the numbers: see StepPacker.pack."""
        host = self._ring.take()
        shape, num = self.packer.pack(items, host, num_padded, width, num_tokens)
        self._device.upload(host[:num], self.buffer.ints[:num])
        self._ring.mark(self._device.record())
        return shape

    def fill_dummies(self, count: int, num_tokens: int = 0) -> None:
        """Copy a step of the dummy slot, and wait for it: ``count`` decodes, or a prompt of
        ``num_tokens`` among ``count`` sequences."""
        host, num = self._ring.take(), self.packer.num_head
        if num_tokens:
            num = self.packer.fill_dummy_prompt(host, count, num_tokens)
        else:
            self.packer.fill_dummies(host, count)
        self._device.upload(host[:num], self.buffer.ints[:num])
        self._device.record().wait()
