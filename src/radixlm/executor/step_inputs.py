"""StepInputs: the buffers through which the inputs of a kind of steps go to the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from radixlm.devices.copies import PinnedRing
from radixlm.devices.device import Device
from radixlm.executor.batch_builder import BatchBuilder
from radixlm.executor.step_layout import DeviceStepBuffer, StepPacker, StepShape
from radixlm.step.batch import AttentionRunner

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

    def fill(self, pack: Callable[[StepPacker, Tensor], tuple[StepShape, int]]) -> StepShape:
        """Launch the copy of a step's inputs. ``pack`` writes them, and tells the step's shape and
        how many integers are used."""
        host = self._ring.take()
        shape, num = pack(self.packer, host)
        self._device.upload(host[:num], self.buffer.ints[:num])
        self._ring.mark(self._device.record())
        return shape
