"""TensorSpool: what it writes is what the format's own library reads; what is refused, and how."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from radixlm.base.errors import InvalidRequest, NotSupported
from radixlm.weight_updates.tensor_spool import SHARED_FOLDER, TensorSpool, read_handles

TENSORS = {
    "model.norm.weight": torch.arange(8, dtype=torch.bfloat16),
    "lm_head.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
}


@pytest.fixture
def spool() -> Iterator[TensorSpool]:
    made = TensorSpool()
    yield made
    made.delete()


def found(spool: TensorSpool) -> dict[str, Tensor]:
    parts = [load_file(part) for part in sorted(spool.settle().glob("part*"))]
    return {name: one for part in parts for name, one in part.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == one.dtype and torch.equal(left[name], one)
        for name, one in right.items()
    )


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_base64_is_one_file_or_the_same_for_each_rank(spool: TensorSpool, copies: int) -> None:
    text = base64.b64encode(save(TENSORS)).decode()
    spool.add_base64([text] * copies if copies else text)
    assert same(found(spool), TENSORS)


async def test_a_stream_is_written_as_it_comes(spool: TensorSpool) -> None:
    data = save(TENSORS)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 5):
            yield data[at : at + 5]

    await spool.add_stream(chunks())
    assert same(found(spool), TENSORS)


def _pickled(value: Any) -> bytes:
    """As the reference's MultiprocessingSerializer."""
    out = io.BytesIO()
    ForkingPickler(out).dump(value)
    return out.getvalue()


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_pickled([("a", [1.0])]), "a pickle (MultiprocessingSerializer) is not read"),
        *((pickle.dumps({"a": 1}, n), "a pickle") for n in (2, 3, 4, 5)),
        (_saved({"a": torch.ones(2)}), "a file of torch.save is not read"),
        (b"x" * 99, "these bytes begin no safetensors file"),
    ],
)
async def test_pickles_are_refused_by_name(spool: TensorSpool, data: bytes, says: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data
        pytest.fail("the rest was read")

    for call in (spool.add_base64, spool.add_bytes):
        sent: Any = base64.b64encode(data).decode() if call == spool.add_base64 else data
        with pytest.raises(InvalidRequest) as raised:
            call(sent)
        assert says in str(raised.value) and "safetensors.torch.save" in str(raised.value)
    with pytest.raises(InvalidRequest, match="safetensors"):
        await spool.add_stream(chunks())
    assert not list(spool.path.glob("part*")) and spool.is_empty


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["a", "b"], "the same for each rank"),
        ("!", "not base64"),
        ([], "truncated"),
        (base64.b64encode(save(TENSORS)[:-1]).decode(), "truncated"),
        (base64.b64encode(save({})).decode(), "no tensors"),
    ],
)
def test_what_is_no_file_is_refused(spool: TensorSpool, texts: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        spool.add_base64(texts)
    assert raised.value.param == "serialized_named_tensors"
    assert not list(spool.path.glob("part*"))


async def test_a_client_that_leaves_leaves_nothing(spool: TensorSpool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield save(TENSORS)[:40]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await spool.add_stream(chunks())
    assert not list(spool.path.glob("part*"))


def test_a_later_tensor_replaces_an_earlier_one(spool: TensorSpool) -> None:
    one, two = torch.ones(3), torch.full((3,), 2.0)
    spool.add_bytes(save({"a": one, "b": one.clone()}))
    spool.add_bytes(save({"b": two, "c": two.clone()}))
    spool.add_bytes(save({"c": one}))
    assert same(found(spool), {"a": one, "b": two, "c": one})


def test_a_flattened_bucket_is_split(spool: TensorSpool) -> None:
    flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in TENSORS.values()])
    places, at = [], 0
    for name, one in TENSORS.items():
        place = {"name": name, "shape": list(one.shape), "dtype": str(one.dtype)}
        places.append({**place, "start_idx": at, "end_idx": at + one.nbytes})
        at += one.nbytes
    metadata = {"metadata": json.dumps(places)}
    spool.add_bytes(save({"flattened_tensor": flat}, metadata), "flattened_bucket")
    assert same(found(spool), TENSORS)
    with pytest.raises(InvalidRequest, match='in its metadata "metadata"'):
        spool.add_bytes(save({"flattened_tensor": flat}), "flattened_bucket")


def test_the_folder_goes_with_the_object_unless_it_is_handed_over() -> None:
    for is_kept in (True, False):
        spool = TensorSpool()
        spool.add_bytes(save(TENSORS))
        folder = spool.hand_over() if is_kept else spool.settle()
        (part,) = folder.glob("part*")
        assert folder.stat().st_mode & 0o777 == 0o700 and part.stat().st_mode & 0o777 == 0o600
        del spool
        assert folder.exists() == is_kept
        shutil.rmtree(folder, ignore_errors=True)


# ---- shared memory -------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHARED_FOLDER / f"radixlm-weights-test-{secrets.token_hex(6)}"
    path.write_bytes(b"")
    yield path
    path.unlink(missing_ok=True)


def _handle(segment: Path, **changes: Any) -> dict[str, Any]:
    return {"name": "a", "dtype": "float32", "shape": [2], "shm": segment.name, **changes}


def test_tensors_in_shared_memory_are_copied(spool: TensorSpool, segment: Path) -> None:
    handles, data = [], b""
    for name, one in TENSORS.items():
        raw = one.reshape(-1).view(torch.uint8).numpy().tobytes()
        place = {"name": name, "dtype": str(one.dtype), "shape": list(one.shape)}
        digest = hashlib.sha256(raw).hexdigest()
        handles.append(_handle(segment, **place, offset=len(data), digest=digest))
        data += raw
    segment.write_bytes(data)
    spool.add_shared(read_handles(handles))
    segment.write_bytes(b"")
    assert same(found(spool), TENSORS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shm": "psm_1234"}, "works: a name such as radixlm-weights-"),
        ({"shm": "../../etc/passwd"}, "no segment that may be read"),
        ({"shm": "radixlm-weights-../x"}, "no segment that may be read"),
        ({"shm": None}, "no segment"),
        ({"offset": -1}, "offset is a number"),
        ({"digest": "abc"}, "SHA-256"),
        ({"dtype": "int3"}, "the dtype 'int3'"),
    ],
)
def test_bad_handles_are_refused(segment: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_handles([_handle(segment, **changes)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shm": "radixlm-weights-absent"}, "cannot be opened: No such file"),
        ({"offset": 4}, "has 8 bytes, not 12"),
        ({"digest": "0" * 64}, "another digest"),
    ],
)
def test_memory_that_does_not_fit_is_refused(
    spool: TensorSpool, segment: Path, changes: dict[str, Any], says: str
) -> None:
    segment.write_bytes(b"\0" * 8)
    with pytest.raises(InvalidRequest, match=says):
        spool.add_shared(read_handles([_handle(segment, **changes)]))
    assert not list(spool.path.glob("part*"))


def test_a_link_is_not_followed(spool: TensorSpool, segment: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 8)
    segment.unlink()
    os.symlink(tmp_path / "secret", segment)
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        spool.add_shared(read_handles([_handle(segment)]))


def test_memory_of_another_user_is_refused(
    spool: TensorSpool, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.write_bytes(b"\0" * 8)
    monkeypatch.setattr(os, "getuid", lambda: segment.stat().st_uid + 1)
    with pytest.raises(InvalidRequest, match="not of the server's user"):
        spool.add_shared(read_handles([_handle(segment)]))


def test_cuda_handles_are_typed_and_refused(segment: Path) -> None:
    keys = {"device_uuid": "GPU-1", "handle": "aa", "storage_bytes": 8, "storage_offset": 0}
    with pytest.raises(NotSupported, match="CUDA IPC"):
        read_handles([_handle(segment, cuda_ipc=keys)])
    with pytest.raises(InvalidRequest, match="cuda_ipc needs device_uuid, handle"):
        read_handles([_handle(segment, cuda_ipc={})])


def test_a_pipe_is_not_waited_for(spool: TensorSpool, segment: Path) -> None:
    segment.unlink()
    os.mkfifo(segment)
    with pytest.raises(InvalidRequest, match="not of the server's user"):
        spool.add_shared(read_handles([_handle(segment)]))


def test_parts_of_another_spool_come_behind(spool: TensorSpool) -> None:
    other = TensorSpool()
    spool.add_bytes(save({"a": torch.zeros(2), "b": torch.ones(1)}))
    other.add_bytes(save({"a": torch.ones(2)}))
    other.add_bytes(save({"c": torch.ones(3)}))
    spool.adopt(other)
    other.delete()
    assert same(found(spool), {"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(3)})
