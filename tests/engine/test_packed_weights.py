"""The packed cache of an engine: when it is used, written, refused and given up."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm import Engine
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.groups import ALONE
from radixlm.engine.load_model import load_model
from radixlm.engine.model_info import resolved
from radixlm.engine.packed_weights import PackedWeights, make_room
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.models.build import Model
from radixlm.weights.packed_file import PackedFileError
from tests.fakes.paged_runner import PagedRunner
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")


def start(folder: Path, cache: Path | None, **options: Any) -> tuple[Model, PackedWeights]:
    """A model as an engine loads it; its packed weights are written."""
    given = {"model_path": str(folder), "device": "cpu", **options}
    if cache is not None:
        given["packed_cache_dir"] = str(cache)
    config, info = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    kernels = bind("cpu")
    packed = PackedWeights(config, info, kernels, ALONE)
    model, _ = load_model(config, info, CPU, kernels, packed=packed)
    packed.committed(None, ())  # type: ignore[arg-type]
    if packed.writer is not None:
        packed.writer.join(30)
        assert not packed.writer.is_alive()
    return model, packed


def is_mapped(folder: Path, cache: Path, **options: Any) -> bool:
    return start(folder, cache, **options)[1].writer is None


def test_the_second_start_maps_what_the_first_has_written(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, _ = start(folder, cache)
    second, packed = start(folder, cache)
    assert packed.writer is None and len(list(cache.iterdir())) == 2
    assert torch.equal(first.embed.unpack(), second.embed.unpack())


def test_other_options_have_other_files(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for options in ({}, {"quantization": "int8wo"}, {"dtype": "float32"}):
        assert not is_mapped(folder, cache, **options)
        assert is_mapped(folder, cache, **options)
    assert len(list(cache.glob("*.packed"))) == 3


def test_a_copy_of_the_checkpoint_finds_the_file_by_its_content(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    start(folder, cache)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert is_mapped(copy, cache)


def test_changed_weights_are_packed_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, weights = tmp_path / "cache", folder / "model.safetensors"
    start(folder, cache)
    stat, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if nothing had changed
    assert not is_mapped(folder, cache)
    assert caplog.text.count("is not used: the checkpoint has changed") == 1
    assert is_mapped(folder, cache)


def test_a_damaged_file_is_written_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    path = start(folder, cache)[1].path
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert not is_mapped(folder, cache)
    assert caplog.text.count("is not used") == 1 and "are damaged" in caplog.text
    assert is_mapped(folder, cache)


def test_a_file_in_the_way_of_the_folder_is_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("")
    _, packed = start(folder, cache)
    assert caplog.text.count("no packed weights are kept") == 1 and not packed.path.exists()


def test_a_small_or_plain_model_is_not_cached_unasked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert not start(folder, None, quantization="int8wo")[1].is_on
    monkeypatch.setattr("radixlm.engine.packed_weights.MIN_BYTES", 1)
    assert not start(folder, None)[1].is_on
    assert not start(folder, None, quantization="int8wo", disable_packed_cache=True)[1].is_on
    assert start(folder, None, quantization="int8wo")[1].path.exists()
    assert (tmp_path / "home" / "radixlm" / "packed").is_dir()


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        path = tmp_path / f"{name}.packed"
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "x.9.part").write_bytes(b"")
    os.utime(tmp_path / "x.9.part", (0, 0))
    make_room(tmp_path, 3500, 1500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.packed", "b.packed"]
    with pytest.raises(PackedFileError, match="more than --packed-cache-gb"):
        make_room(tmp_path, 3500, 4000)


def test_a_disk_without_room_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    caplog.set_level(logging.WARNING)
    _, packed = start(folder, tmp_path / "cache")
    assert "lacks room" in caplog.text and not packed.path.exists()


def test_a_server_that_stops_leaves_no_half_file(folder: Path, tmp_path: Path) -> None:
    given = {"model_path": str(folder), "packed_cache_dir": str(tmp_path / "cache")}
    config, info = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    kernels = bind("cpu")
    packed = PackedWeights(config, info, kernels, ALONE)
    load_model(config, info, CPU, kernels, packed=packed)
    packed.close()
    assert packed.writer is not None and not packed.writer.is_alive()
    assert not list((tmp_path / "cache").glob("*.p*"))


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("share", [0.0, 1e-7])
def test_a_model_larger_than_memory_is_served_from_its_file(
    arch: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.engine.packed_weights.LARGE_SHARE", 0.0)
    monkeypatch.setattr("radixlm.engine.packed_weights.RESIDENT_SHARE", share)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_tiny(arch)
    plain, _ = start(folder, None, disable_packed_cache=True)
    plain.use_program = False
    first, packed = start(folder, None)  # is written while it loads
    assert packed.writer is None and packed.path.exists()
    second, _ = start(folder, None)
    ids = {0: [5, 6, 7, 8], 1: [9, 10]}
    expected = PagedRunner(plain, "cpu", page_size=16).prefill(ids)
    for model in (first, second):
        assert model.pager is not None and model.pager.first < len(model.blocks)
        got = PagedRunner(model, "cpu", page_size=16).prefill(ids)
        assert all(torch.equal(got[one], expected[one]) for one in ids)


def test_a_model_larger_than_memory_is_released_but_not_updated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while its weights are released: there is no room for them but in their file."""
    monkeypatch.setattr("radixlm.engine.packed_weights.LARGE_SHARE", 0.0)
    options = {"packed_cache_dir": str(tmp_path / "cache"), "enable_memory_saver": True}
    greedy = {"temperature": 0.0, "max_new_tokens": 4}
    with Engine(model_path=str(folder), skip_tokenizer_init=True, max_total_tokens=512,
                log_level="error", **options) as engine:  # fmt: skip
        wanted = engine.generate(input_ids=[5, 6, 7], sampling_params=greedy)["output_ids"]
        pagers = [one for one in threading.enumerate() if one.name == "weight pager"]
        engine.release_memory_occupation(["weights"])
        is_ok, message, _ = engine.update_weights_from_disk(str(folder))
        assert not is_ok and "read from their packed file cannot be updated" in message
        for one in pagers:
            one.join(10)
            assert not one.is_alive()
        engine.resume_memory_occupation()
        found = engine.generate(input_ids=[5, 6, 7], sampling_params=greedy)
        assert found["output_ids"] == wanted


def test_large_weights_that_cannot_be_written_must_fit(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("radixlm.engine.packed_weights.LARGE_SHARE", 0.0)
    (tmp_path / "cache").write_text("")
    model, _ = start(folder, tmp_path / "cache")
    assert model.pager is None and "the weights must fit into memory" in caplog.text


def test_a_disk_that_fills_while_a_large_model_loads(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("radixlm.engine.packed_weights.LARGE_SHARE", 0.0)
    write, room = os.pwrite, 20_000

    def fill(descriptor: int, data: memoryview, at: int) -> int:
        if at + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", fill)
    model, _ = start(folder, tmp_path / "cache")
    assert model.pager is None and "No space left" in caplog.text
    assert not list((tmp_path / "cache").glob("*.p*"))
    plain, _ = start(folder, None, disable_packed_cache=True)
    assert torch.equal(model.embed.unpack(), plain.embed.unpack())


def test_a_model_that_a_file_cannot_give_is_not_written_again(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "cache"
    start(folder, cache)
    monkeypatch.setattr(
        "radixlm.weights.packed_cache.LayerReplay.packed", lambda replay, make: make()
    )
    model, packed = start(folder, cache)
    assert "this model gets no packed cache" in caplog.text and not packed.path.exists()
    assert not start(folder, cache)[1].is_on
    plain, _ = start(folder, None, disable_packed_cache=True)
    assert torch.equal(model.embed.unpack(), plain.embed.unpack())
