"""Groups of a trainer and a server's receivers, over gloo, with real processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from radixlm.base.errors import InvalidRequest
from radixlm.engine.weight_groups import GroupPlace, WeightGroups
from radixlm.wire.tensors import TensorInfo, tensor_info
from tests.fakes.trainer import Trainer

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.randn(70_000),
    "c": torch.arange(5),
}
INFOS = [tensor_info(name, one.dtype, list(one.shape)) for name, one in TENSORS.items()]
LIMIT_S = 60.0


@pytest.fixture
def sent(tmp_path: Path) -> dict[str, Any]:
    save_file(TENSORS, tmp_path / "sent.safetensors")
    return {"path": str(tmp_path / "sent.safetensors"), "names": list(TENSORS)}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest_asyncio.fixture
async def groups() -> AsyncIterator[WeightGroups]:
    made = WeightGroups(2, LIMIT_S)
    yield made
    await made.close()
    assert not [one for one in psutil.Process().children() if "weight_receiver" in _name(one)]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def met(groups: WeightGroups, trainer: Trainer, name: str = "g") -> None:
    port = free_port()
    trainer.tell("join", port=port, world_size=3, group=name)
    await groups.join(name, GroupPlace("127.0.0.1", port, 1, 3))
    assert trainer.answer() == "ok"


def same(path: Path) -> bool:
    found = load_file(path)
    return found.keys() == TENSORS.keys() and all(
        torch.equal(found[name], one) for name, one in TENSORS.items()
    )


async def test_weights_arrive_and_a_dead_trainer_leaves_nothing(
    groups: WeightGroups, sent: dict[str, Any], tmp_path: Path
) -> None:
    """One after the other and in a bucket; then the trainer dies amid an update, and another one
    makes the group anew."""
    with Trainer() as trainer:
        await met(groups, trainer)
        for number, verb in enumerate(("send", "send", "bucket")):
            path = tmp_path / f"{number}.safetensors"
            trainer.tell(verb, **sent)
            await groups.receive("g", INFOS, path, verb == "bucket")
            assert trainer.answer() == "ok" and same(path)
        trainer.tell("part", **sent)
        lost = asyncio.ensure_future(groups.receive("g", INFOS, tmp_path / "lost.safetensors"))
        assert await asyncio.to_thread(trainer.answer) == "ok"  # the first has arrived
        trainer.kill()
        with pytest.raises(InvalidRequest, match=r"'g' broke down.*the weights have not changed"):
            await lost
    assert not (tmp_path / "lost.safetensors").exists()
    with Trainer() as trainer:
        await met(groups, trainer)
        trainer.tell("send", **sent)
        await groups.receive("g", INFOS, tmp_path / "new.safetensors")
        assert same(tmp_path / "new.safetensors")
        await groups.leave("g")
    with pytest.raises(InvalidRequest, match="there is no group 'g'"):
        await groups.leave("g")


async def test_a_trainer_that_sends_other_shapes_harms_nothing(
    groups: WeightGroups, sent: dict[str, Any], tmp_path: Path
) -> None:
    with Trainer() as trainer:
        await met(groups, trainer)
        groups._timeout_s = 5.0
        trainer.tell("send", **sent)
        small = [TensorInfo("a", "BF16", (1, 1)), *INFOS[1:]]
        with pytest.raises(InvalidRequest, match="make the group anew"):
            await groups.receive("g", small, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


async def test_a_trainer_that_never_comes_is_waited_for_no_longer_than_said(
    groups: WeightGroups,
) -> None:
    groups._timeout_s = 1.0
    place = GroupPlace("127.0.0.1", free_port(), 1, 3)
    with pytest.raises(InvalidRequest, match="cannot be joined"):
        await groups.join("g", place)
    with pytest.raises(InvalidRequest, match=r"no group 'g' \(groups: none\)"):
        await groups.receive("g", INFOS, Path("unused"))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("", {}, "group_name: .* needs a name"),
        ("g", {"backend": "mpi"}, "one of gloo, nccl"),
        ("g", {"backend": "nccl"}, "here 'gloo' works"),
        ("g", {"master_port": 0}, "a port from 1 to 65535"),
        ("g", {"rank_offset": 0}, "rank_offset 1 and world_size 3"),
        ("g", {"world_size": 2}, "rank_offset 1 and world_size 3"),
    ],
)
async def test_what_cannot_be_a_group_is_refused(
    groups: WeightGroups, name: str, changes: dict[str, Any], says: str
) -> None:
    values = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
    with pytest.raises(InvalidRequest, match=says):
        await groups.join(name, GroupPlace(**{**values, **changes}))


async def test_a_name_is_taken_from_the_first_call_on() -> None:
    groups, place = WeightGroups(1, LIMIT_S), GroupPlace("127.0.0.1", free_port(), 1, 2)
    first = asyncio.create_task(groups.join("g", place))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="the group 'g' exists"):
        await groups.join("g", place)
    with pytest.raises(InvalidRequest, match="no group 'g'"):
        await groups.receive("g", INFOS, Path("none"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(InvalidRequest, match="there is no group 'g'"):
        await groups.leave("g")
    assert not [one for one in psutil.Process().children() if "weight_receiver" in _name(one)]
