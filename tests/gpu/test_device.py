"""The CUDA device behind the device protocol, and sampling on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.cuda_graphs.graphs import StepGraphs
from radixlm.devices.copies import PinnedRing
from radixlm.devices.cuda import CudaDevice, cuda_device
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.step_layout import POSITION, DeviceStepBuffer, StepPacker
from radixlm.sampling.plain import (
    SamplingKinds,
    SamplingParamTable,
    fused_sampler,
    sample_plain,
)
from radixlm.sampling.table import SamplingTable
from radixlm.step.plan import Item, Items
from radixlm.wire.sampling_params import SamplingParams

VOCAB = 5000


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0)


def test_copies_and_events_keep_their_order(device: CudaDevice) -> None:
    ring, target = (
        PinnedRing(device, 1 << 20, 3),
        torch.zeros(1 << 20, dtype=torch.int32, device="cuda"),
    )
    landing = device.pinned(4)
    for value in range(10):
        host = ring.take()
        host.fill_(value)
        device.upload(host, target)
        ring.mark(device.record())
        device.launch(lambda: target.add_(1))
    device.download(lambda: target[-4:], landing)
    device.record().wait()
    assert landing.tolist() == [10] * 4


def test_a_graph_reads_current_values(device: CudaDevice) -> None:
    numbers = torch.arange(8, device="cuda")
    graphs = StepGraphs(device, (2, 8))
    graphs.capture(lambda size: numbers[:size].float()[:, None] * 2)
    for start in (0, 5):
        numbers.copy_(torch.arange(start, start + 8))
        for size in (2, 8):
            want = [[2.0 * (start + i)] for i in range(size)]
            assert graphs.replay(size).tolist() == want
    assert graphs.size_for(3) == 8 and graphs.size_for(9) == 0


def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--base-gpu-id"):
        cuda_device(torch.cuda.device_count())


@pytest.mark.parametrize("fused", [False, True])
def test_samples_equal_those_of_the_cpu(device: CudaDevice, fused: bool) -> None:
    """Greedy rows are equal; of the others nearly all, because logarithms differ in the last
    bit."""
    fused_kernel = fused_sampler(device.where)
    if fused and fused_kernel is None:
        pytest.skip("triton is not installed")
    rows = 64
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, VOCAB, generator=generator) * 3
    table, draws = SamplingTable(rows, VOCAB), SamplingParamTable(rows, VOCAB)
    kinds = [{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}]
    for slot in range(rows):
        fields = {"temperature": 0.0} if slot % 5 == 0 else kinds[slot % 4]
        params = SamplingParams(sampling_seed=slot, **fields)
        table.set(slot, params, [1])
        draws.set(slot, table.state(slot), False)
    tables = DeviceTables(rows, 4, 1, torch.device("cpu"))
    packer = StepPacker(tables, draws, rows, 8, 8)
    host = torch.zeros(packer.num_ints, dtype=torch.int32)
    items = tuple(Item(str(s), s, 3 + s, 1, None, True) for s in range(rows))
    packer.pack(Items.of(items), host)
    numbers, needs = DeviceStepBuffer(host, packer), SamplingKinds(True, False, True)
    want = sample_plain(logits.clone(), numbers.params(rows), numbers.field(POSITION, rows), needs)
    numbers = DeviceStepBuffer(host.cuda(), packer)
    params, positions = numbers.params(rows), numbers.field(POSITION, rows)
    if fused:
        assert fused_kernel is not None
        got, is_bad = fused_kernel(logits.cuda(), params, positions)
        assert not is_bad.any()
    else:
        got = sample_plain(logits.cuda(), params, positions, needs)
    same = (got.cpu() == want).numpy()
    assert same[np.arange(rows) % 5 == 0].all() and same.mean() >= 0.95
