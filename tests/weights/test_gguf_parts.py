"""GGUF in several parts equals the single file, and damage is named by its part."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes import gguf_file
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.arch.gguf import first_parts, parts_of, read_header
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.engine.gguf import unpacked
from radixlm.engine.model_info import find_model
from radixlm.weights.gguf_file import GgufSource

SECOND = "m-00002-of-00003.gguf"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three parts and nothing else."""
    made = tmp_path / "parts"
    made.mkdir()
    tiny = cached_tiny("Qwen3ForCausalLM")
    gguf_file.convert(tiny, made / "m.gguf", "qwen3", "F32", {}, num_parts=3)
    return made


@pytest.mark.parametrize("named", ["", "m-00001-of-00003.gguf", SECOND])
def test_parts_equal_the_single_file(named: str, folder: Path, tmp_path: Path) -> None:
    """By the folder or any part; also if the parts are links with other names."""
    tiny = cached_tiny("Qwen3ForCausalLM")
    whole = GgufSource(gguf_file.convert(tiny, tmp_path / "w.gguf", "qwen3", "F32", {}))
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, tmp_path / f"blob{number}")
        file.symlink_to(f"../blob{number}")
    found = find_model(str(folder / named))
    source = GgufSource(next(iter(sorted(found.glob("*.gguf")))))
    assert source.sizes() == whole.sizes()
    assert all(torch.equal(source.read(name), whole.read(name)) for name in whole.sizes())
    assert source.files() == tuple(sorted(folder.iterdir()))


def test_a_model_loads_from_parts(folder: Path) -> None:
    model = load_model(find_model(str(folder)))
    alone = load_model(cached_tiny("Qwen3ForCausalLM"))
    assert torch.equal(model.embed.unpack(), alone.embed.unpack())
    assert len(list(find_model(str(folder)).glob("*.gguf"))) == 3  # files for the prefetch


def _gone(folder: Path) -> str:
    (folder / SECOND).unlink()
    return rf"missing files: {SECOND}$"


def _cut(folder: Path) -> str:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100])
    return rf"{SECOND}: truncated: blk\.\d"


def _exchanged(folder: Path) -> str:
    shutil.copy(folder / "m-00003-of-00003.gguf", folder / SECOND)
    return rf"{SECOND}: has split\.no 2 of 3, by its name it is 1 of 3"


def _of_another(folder: Path) -> str:
    place = {"split.no": 1, "split.count": 3}
    gguf_file.write(folder / SECOND, place, {"output_norm.weight": (torch.ones(64), "F32")})
    return rf"(00003\.gguf: output_norm\.weight is also in another part|{SECOND}: is of another)"


def _poorer(folder: Path) -> str:
    gguf_file.write(folder / SECOND, {"split.no": 1, "split.count": 3}, {})
    return r"m-00001-of-00003\.gguf: split\.tensors\.count is 36, the parts hold 24"


def _renamed(folder: Path) -> str:
    for number in (2, 3):
        (folder / f"m-0000{number}-of-00003.gguf").unlink()
    (folder / "m-00001-of-00003.gguf").rename(folder / "m.gguf")
    return r"m\.gguf: has split\.no 0 of 3, by its name it is 0 of 1"


def _not_a_number(folder: Path) -> str:
    header = read_header(folder / SECOND)
    name, tensor = next((n, t) for n, t in header.tensors.items() if t.file.name == SECOND)
    raw = bytearray((folder / SECOND).read_bytes())
    raw[tensor.end - 4 : tensor.end] = struct.pack("<f", float("nan"))
    (folder / SECOND).write_bytes(raw)
    return rf"parts: .*NaN.*\({SECOND}: {name}\)"


@pytest.mark.parametrize(
    "damage", [_gone, _cut, _exchanged, _of_another, _poorer, _renamed, _not_a_number]
)
def test_damage_is_named_by_its_part(damage: Callable[[Path], str], folder: Path) -> None:
    message = damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(find_model(str(folder)))


def test_two_models_in_a_folder_are_not_mixed(folder: Path) -> None:
    gguf_file.write(folder / "other.gguf", {"general.architecture": "llama"}, {})
    with pytest.raises(ConfigError, match=r"name one: m-00001-of-00003\.gguf, other\.gguf"):
        find_model(str(folder))
    assert unpacked(folder / SECOND).is_dir()


def test_names_of_parts() -> None:
    assert [p.name for p in parts_of(Path("/a/x-00002-of-00002.gguf"))] == [
        "x-00001-of-00002.gguf",
        "x-00002-of-00002.gguf",
    ]
    for alone in ("x.gguf", "x-00000-of-00000.gguf", "x-00003-of-00002.gguf", "x-2-of-3.gguf"):
        assert parts_of(Path(alone)) == [Path(alone)]
    files = [Path("x-00002-of-00002.gguf"), Path("x-00001-of-00002.gguf"), Path("y.gguf")]
    assert first_parts(files) == [Path("x-00001-of-00002.gguf"), Path("y.gguf")]


def test_a_media_encoder_beside_the_model_is_no_second_model(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("mmproj-F16.gguf", "m-00002-of-00002.gguf")]
    assert first_parts(files) == [tmp_path / "m-00001-of-00002.gguf"]
