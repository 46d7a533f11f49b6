"""Memory of pools that outlives an engine: when it is warm, and what it has then."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from radixlm.pools.memory import KeptMemory, drop_pages, pool_tensor, resident_bytes

HOST, ONE, OTHER = torch.device("cpu"), b"1" * 32, b"2" * 32


@pytest.fixture
def path() -> Iterator[str]:
    descriptor = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def fill(memory: KeptMemory, value: float, is_sealed: bool = True) -> torch.Tensor:
    assert memory.agree([7]) == [7]
    with memory.lent():
        tensor = pool_tensor((3, 5), torch.bfloat16, HOST)
        other = pool_tensor((3 << 20,), torch.int8, HOST, is_zero=False)
    was = tensor.clone()
    tensor.fill_(value)
    other.fill_(1)
    if is_sealed:
        memory.seal()
    return was


def test_the_next_engine_finds_its_tensors_and_its_numbers(path: str) -> None:
    first = KeptMemory(path, ONE)
    assert not first.is_warm and not fill(first, 2.5).any()
    assert first.num_held >= 3 << 20
    second = KeptMemory(path, ONE)
    assert second.is_warm and second.agree([99]) == [7]
    with second.lent():
        assert (pool_tensor((3, 5), torch.bfloat16, HOST) == 2.5).all()
        assert (pool_tensor((3 << 20,), torch.int8, HOST) == 1).all()
    assert not pool_tensor((2, 2), torch.int8, HOST).any()


def test_another_model_or_a_start_that_was_not_finished_is_cold(path: str) -> None:
    fill(KeptMemory(path, ONE), 1.0)
    other = KeptMemory(path, OTHER)
    assert not other.is_warm and not fill(other, 3.0, is_sealed=False).any()
    assert not KeptMemory(path, OTHER).is_warm


@pytest.mark.parametrize("at", [0, 9, 45, 60, 176])
def test_a_damaged_header_is_cold(path: str, at: int) -> None:
    fill(KeptMemory(path, ONE), 1.0)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 16]))
    assert not KeptMemory(path, ONE).is_warm


def test_memory_that_was_cut_is_cold(path: str) -> None:
    fill(KeptMemory(path, ONE), 1.0)
    os.truncate(path, 4 << 20)
    assert not KeptMemory(path, ONE).is_warm


def test_memory_is_resident_once_it_is_written(path: str) -> None:
    with KeptMemory(path, ONE).lent():
        tensor = pool_tensor((64 << 20,), torch.int8, HOST)
    assert resident_bytes(tensor) < 8 << 20
    tensor[: 32 << 20] = 1
    assert 32 << 20 <= resident_bytes(tensor) < 48 << 20
    drop_pages(tensor)
    assert resident_bytes(tensor) < 8 << 20
    assert resident_bytes(torch.empty(0)) == 0
