"""SGLang's update kits against real servers, between the bundled model and another:
test_get_weights_by_name, test_update_weights_from_disk, ..._from_tensor, ..._from_distributed."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from radixlm.weights_client import checksums, update_weights_from_tensor
from tests.end_to_end.server import RunningServer
from tests.engine.test_weight_groups import free_port
from tests.fakes.perturbed import perturbed
from tests.fakes.trainer import Trainer

BASE = ASSETS / DEFAULT_MODEL
DECODE = {
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
}
NUM_STREAMS = 8
pytestmark = pytest.mark.skipif(not (BASE / "config.json").is_file(), reason="no bundled model")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: one for part in parts for name, one in part.items()}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(BASE, tmp_path_factory.mktemp("other") / "other")


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    args = ("--tp-size", str(request.param), "--max-total-tokens", "16384")
    folder = str(tmp_path_factory.mktemp("spool"))
    environment = {"RADIXLM_WEIGHT_GROUP_TIMEOUT_S": "120", "TMPDIR": folder}
    with RunningServer(*args, environment=environment) as running:
        running.num_ranks, running.folder = request.param, folder  # type: ignore[attr-defined]
        yield running
        assert "Traceback" not in "".join(running.log)


@pytest.fixture(autouse=True)
def _from_base(server: RunningServer) -> None:
    assert server.post("/update_weights_from_disk", model_path=str(BASE)).json()["success"]


def decode(server: RunningServer) -> str:
    return str(server.post("/generate", **DECODE).json()["text"])


def model_path(server: RunningServer) -> str:
    return str(server.client.get("/get_model_info").json()["model_path"])


def check_weights(server: RunningServer, wanted: dict[str, Tensor]) -> None:
    """A few weights by name, as the reference asks for them, and all by digest."""
    names = [name for name in wanted if ".1." in name or "layers" not in name]
    for name in names[:12]:
        body = {"name": name, "truncate_size": 100}
        got = server.client.request("GET", "/get_weights_by_name", json=body).json()
        assert torch.equal(torch.tensor(got), wanted[name][:100].float()), name
    (rank,) = server.client.get("/weights_checker?action=checksum").json()["ranks"]
    assert rank["checksums"] == checksums(wanted)


def test_from_disk(server: RunningServer, other: Path) -> None:
    origin_path, origin = model_path(server), decode(server)
    check_weights(server, tensors_of(BASE))
    got = server.post("/update_weights_from_disk", model_path=str(other))
    assert got.json()["success"], got.text
    assert model_path(server) == str(other) != origin_path
    assert decode(server)[:32] != origin[:32]
    check_weights(server, tensors_of(other))
    assert server.post("/update_weights_from_disk", model_path=origin_path).json()["success"]
    assert model_path(server) == origin_path and decode(server) == origin
    got = server.post("/update_weights_from_disk", model_path=str(other) + "wrong")
    assert got.status_code == 400 and not got.json()["success"]
    assert model_path(server) == origin_path and decode(server) == origin


def test_from_tensor(server: RunningServer, other: Path) -> None:
    origin, new = decode(server), tensors_of(other)
    answer = update_weights_from_tensor(server.url, new, weight_version="2")
    assert answer["success"] and decode(server) != origin
    check_weights(server, new)
    assert server.client.get("/get_weight_version").json()["weight_version"] == "2"
    answer = update_weights_from_tensor(server.url, tensors_of(BASE), shared_memory=True)
    assert answer["success"] and decode(server) == origin
    out = io.BytesIO()
    ForkingPickler(out).dump(list(new.items()))
    sent = [base64.b64encode(out.getvalue()).decode()] * 2
    got = server.post("/update_weights_from_tensor", serialized_named_tensors=sent)
    assert got.status_code == 400 and "weights_client" in got.json()["message"]
    with pytest.raises(InvalidRequest, match=r"model\.nothing"):
        update_weights_from_tensor(server.url, {"model.nothing": torch.ones(1)})
    assert decode(server) == origin


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_streams_go_on_through_an_update(server: RunningServer, other: Path, mode: str) -> None:
    """The reference's test_update_weights_force: pause, update, continue; nothing is aborted."""
    found: dict[int, Any] = {}
    body = {**DECODE, "sampling_params": {**DECODE["sampling_params"], "max_new_tokens": 200}}

    def call(index: int) -> None:
        found[index] = server.post("/generate", **body).json()

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda: server.info().get("num_running_reqs", 0) > 1)
    assert server.post("/pause_generation", mode=mode).status_code == 200
    assert update_weights_from_tensor(server.url, tensors_of(other), weight_version=mode)["success"]
    assert server.post("/continue_generation").status_code == 200
    for thread in threads:
        thread.join(200)
    assert len(found) == NUM_STREAMS
    for answer in found.values():
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert answer["meta_info"]["completion_tokens"] == 200
        assert answer["meta_info"]["weight_version"] == mode


def test_from_distributed(server: RunningServer, other: Path) -> None:
    """The trainer is rank 0 of a group of gloo, the server has one rank for each of its own."""
    origin, new, port = decode(server), tensors_of(other), free_port()
    (file,) = other.glob("*.safetensors")
    names, num_ranks = sorted(new), getattr(server, "num_ranks", 1)
    described = {
        "names": names,
        "dtypes": [str(new[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(new[name].shape) for name in names],
        "group_name": "test_parameter_update_group",
    }
    group = {"group_name": "test_parameter_update_group"}
    with Trainer() as trainer:
        trainer.tell("join", port=port, world_size=1 + num_ranks, group=group["group_name"])
        place = {"master_address": "localhost", "master_port": str(port), "rank_offset": 1}
        place |= {"world_size": 1 + num_ranks, "backend": "gloo"}
        got = server.post("/init_weights_update_group", **place, **group)
        assert got.json()["success"], got.text
        assert trainer.answer() == "ok"
        trainer.tell("send", path=str(file), names=names)
        got = server.post("/update_weights_from_distributed", **described)
        assert got.json()["success"] and trainer.answer() == "ok"
        assert decode(server) != origin
        check_weights(server, new)
        trainer.kill()
        got = server.post("/update_weights_from_distributed", **described)
        assert got.status_code == 400 and "make the group anew" in got.json()["message"]
    check_weights(server, new)
    assert server.post("/destroy_weights_update_group", **group).status_code == 400


def test_a_large_file_is_not_kept_in_memory(server: RunningServer) -> None:
    """The server writes what comes to disk, and refuses it since the name is unknown."""
    sent = {"model.nothing": torch.zeros(64 << 20, dtype=torch.float32)}
    status = Path(f"/proc/{server.process.pid}/status")

    def peak_mb() -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) >> 10

    before_mb = peak_mb()
    with pytest.raises(InvalidRequest, match=r"model\.nothing"):
        update_weights_from_tensor(server.url, sent)
    assert peak_mb() - before_mb < 64


def test_a_hundred_updates_under_streams_leave_nothing(server: RunningServer) -> None:
    """No stream fails, and neither memory, descriptors nor files grow."""
    base = tensors_of(BASE)
    some = {name: one for name, one in base.items() if ".0.mlp" in name or "norm" in name}
    other = {name: one * 1.01 for name, one in some.items()}
    found: list[Any] = []
    folder = Path(server.folder)  # type: ignore[attr-defined]
    is_over = threading.Event()

    def stream() -> None:
        while not is_over.is_set():
            found.append(server.post("/generate", **DECODE).json())

    def used() -> tuple[int, int, int]:
        """MB of memory and descriptors of the server and its engines, and folders of updates."""
        processes = [psutil.Process(server.process.pid), *server.engines()]
        memory = sum(one.memory_info().rss for one in processes) >> 20
        folders = len(list(folder.glob("radixlm-weights-*")))
        return memory, sum(one.num_fds() for one in processes), folders

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = None
    for number in range(100):
        mode = ("retract", "in_place")[number // 2 % 2]
        sent = some if number % 2 else other
        shared = number % 4 < 2
        label = str(number)
        answer = update_weights_from_tensor(
            server.url, sent, mode=mode, shared_memory=shared, weight_version=label
        )
        assert answer["success"]
        if number == 20:
            before = used()
    is_over.set()
    for thread in threads:
        thread.join(100)
    after = used()
    assert before is not None
    assert after[0] - before[0] < 48 and after[1] - before[1] < 20 and after[2] - before[2] < 3
    kinds = {answer["meta_info"]["finish_reason"]["type"] for answer in found}
    assert kinds == {"length"} and len(found) > 8
    check_weights(server, base)
