"""The weight loader: every format gives the same model, and every kind of damage an error that
names it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.sharded_state import save_sharded_state
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny, make_tiny

from radixlm.arch.hf import describe
from radixlm.arch.names import untied_with_bias
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import replace
from radixlm.kernels.dispatch import bind
from radixlm.models.build import Model, build_model
from radixlm.weights.folder import find_files
from radixlm.weights.load import load_weights, non_finite_problem, open_reader
from radixlm.weights.options import LoadOptions

CPU = torch.device("cpu")
FILE = "model.safetensors"


def empty_model(folder: Path, **build: Any) -> Model:
    kernels = bind("cpu", {"all": "reference"})
    return build_model(describe(folder), CPU, torch.float32, kernels, **build)


def loaded(folder: Path, load_format: str = "auto", **build: Any) -> Model:
    model = empty_model(folder, **build)
    load_weights(model, folder, load_format, progress=False)
    return model


def weights_of(model: Model) -> list[torch.Tensor]:
    found = [model.embed.unpack(), model.norm.weight_D]
    for block in model.blocks:
        found += [block.norm1.weight_D, block.mixer.qkv.packed.unpack()]
        found += [block.mixer.o.packed.unpack(), block.ffn.up.packed.unpack()]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")


def shard(folder: Path, save: Any, ending: str, stem: str) -> None:
    """Replace the single file by two files and an index."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{number:05d}-of-00002{ending}"
        save({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / f"{stem}{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def as_pickle(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["shards", "bin", "bin shards", "old bin", "npcache"])
def test_every_format_gives_the_same_weights(folder: Path, kind: str) -> None:
    expected = weights_of(loaded(folder))
    load_format = "auto"
    if kind == "shards":
        shard(folder, save_file, ".safetensors", "model")
    elif kind == "bin shards":
        shard(folder, torch.save, ".bin", "pytorch_model")
    elif kind == "old bin":
        tensors = load_file(folder / FILE)
        (folder / FILE).unlink()
        file = folder / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=False)
    else:
        as_pickle(folder)
        load_format = "npcache" if kind == "npcache" else "pt"
    for _ in range(2):  # the second load reads npcache's cache
        for got, want in zip(weights_of(loaded(folder, load_format)), expected, strict=True):
            assert torch.equal(got, want)
    assert (folder / "np").exists() == (kind == "npcache")


def test_numpy_cache_keeps_bfloat16_and_does_not_need_the_pickle(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("LlamaForCausalLM", dtype=torch.bfloat16), tmp_path / "m")
    as_pickle(folder)
    first = weights_of(loaded(folder, "npcache"))
    (folder / "pytorch_model.bin").write_bytes(b"")
    second = weights_of(loaded(folder, "npcache"))
    assert first[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_sharded_state_round_trip(arch: str, tmp_path: Path) -> None:
    folder = cached_tiny(arch)
    model = loaded(folder)
    saved = tmp_path / "saved"
    save_sharded_state(empty_model(folder), open_reader(model, folder, "auto"), saved)
    (saved / "config.json").write_text((folder / "config.json").read_text())
    again = loaded(saved, "sharded_state")
    assert torch.equal(again.embed.unpack(), model.embed.unpack())
    for old, new in zip(model.blocks, again.blocks, strict=True):
        assert torch.equal(old.mixer.qkv.packed.unpack(), new.mixer.qkv.packed.unpack())


def test_each_rank_reads_its_own_sharded_state(folder: Path, tmp_path: Path) -> None:
    own, saved = [], tmp_path / "saved"
    for rank in (0, 1):
        other = make_tiny("Qwen3ForCausalLM", tmp_path / f"rank-{rank}", seed=rank)
        model = empty_model(other)
        own.append(loaded(other).embed.unpack())
        save_sharded_state(model, open_reader(model, other, "auto"), saved, rank)
    for rank, number in ((0, 0), (1, 1), (2, 0)):  # one without files: its part of whole ones
        model = empty_model(folder)
        options = LoadOptions(rank=rank)
        load_weights(model, saved, "sharded_state", progress=False, options=options)
        assert torch.equal(model.embed.unpack(), own[number])


def test_dummy_weights_are_deterministic_and_usable(tmp_path: Path) -> None:
    config = (cached_tiny("Qwen3ForCausalLM") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    one, other = weights_of(loaded(tmp_path, "dummy")), weights_of(loaded(tmp_path, "dummy"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert one[0].std() > 0
    assert abs(float(one[1].mean()) - 1) < 0.1


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_policy(stored: torch.dtype, asked: torch.dtype | None, kept: torch.dtype) -> None:
    folder = cached_tiny("Qwen3ForCausalLM", dtype=stored)
    model = loaded(folder, weight_dtype=asked)
    assert model.embed.unpack().dtype == kept
    assert model.blocks[0].mixer.qkv.packed.unpack().dtype == kept
    assert model.norm.weight_D.dtype == torch.float32


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE)


GATE = "model.layers.1.mlp.gate_proj.weight"


def test_all_missing_and_unknown_tensors_are_listed(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mystery.weight"] = tensors.pop("model.norm.weight")
        del tensors[GATE]

    change(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        loaded(folder)
    message = str(caught.value)
    assert "2 missing, 1 unknown" in message
    for name in ("model.norm.weight", GATE, "model.layers.0.mystery.weight"):
        assert name in message


def test_empty_tensors_are_ignored(folder: Path) -> None:
    """Hugging Face saves empty matrices for the shared experts of a model without them."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.shared_experts.up_proj.weight"] = torch.zeros(0, 64)

    change(folder, edit)
    loaded(folder)


def test_a_tied_matrix_may_be_stored_as_the_head(tmp_path: Path) -> None:
    make_tiny("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=True)
    before = weights_of(loaded(tmp_path))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    change(tmp_path, rename)
    assert all(map(torch.equal, before, weights_of(loaded(tmp_path))))


def test_the_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    tensors = load_file(folder / FILE)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # never read
    save_file(tensors, folder / FILE)
    model = empty_model(folder)
    reader = open_reader(model, folder, "auto")
    released = [
        reader.release(f"{path}.{name}")
        for path, layer in model.layers()
        for name in layer.own_params()
    ]
    assert reader.ignored == ("lm_head.weight",)
    assert sum(released) == reader.total_bytes


def test_every_wrong_shape_is_named_with_both_sides(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(63)
        tensors["model.layers.2.self_attn.o_proj.weight"] = torch.ones(64, 95)
        tensors[GATE] = torch.ones(96, 63)

    change(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        loaded(folder)
    message = str(caught.value)
    assert f"norm.weight is [64], the checkpoint has [63] ({FILE}: model.norm.weight" in message
    assert "blocks.2.mixer.o.weight is [64, 96], the checkpoint has [64, 95]" in message
    assert f"{FILE}: {GATE} [96, 63], model.layers.1.mlp.up_proj.weight [96, 64]" in message


@pytest.mark.parametrize("name", [GATE, "model.norm.weight"])
def test_infinity_is_named(name: str, folder: Path) -> None:
    def infinities(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0], tensors[name].view(-1)[5] = torch.inf, -torch.inf

    change(folder, infinities)
    with pytest.raises(CheckpointError, match=rf"holds infinity.*\({FILE}: {name}\)") as raised:
        loaded(folder)
    assert str(folder) in str(raised.value)


def test_sums_may_overflow_and_biases_be_infinite() -> None:
    large = torch.full((64, 64), 6e4, dtype=torch.float16)
    assert non_finite_problem("a.weight", large) == ""
    forbidding = torch.tensor([0.0, -torch.inf])
    assert non_finite_problem("head.bias", forbidding) == ""
    assert "infinity" in non_finite_problem("head.weight", forbidding)
    both = torch.tensor([-torch.inf, torch.nan])
    assert "NaN" in non_finite_problem("head.bias", both)


def test_nan_is_named(folder: Path) -> None:
    def nan(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE][5, 7] = torch.nan

    change(folder, nan)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ffn\.up\.weight holds NaN"):
        loaded(folder)


def test_integers_in_place_of_weights_are_refused(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight is a floating-point weight.*int32"):
        loaded(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        loaded(folder)


def test_truncated_pickle(folder: Path) -> None:
    as_pickle(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: "):
        loaded(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_pickle_that_would_run_code_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than tensors"):
        loaded(folder)
    assert "executed" not in capsys.readouterr().out


def header_of(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 1 << 40) + b"{}", "truncated"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 2) + b"{:", "no JSON"),
        (header_of({"a": 3}), "malformed entry for a"),
        (header_of({"a": {"dtype": "F9", "shape": [], "data_offsets": [0, 4]}}), "unknown dtype"),
        (header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "do not make"),
        (header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}), "malformed"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), "malformed"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "truncated"),
    ],
)
def test_malformed_header(folder: Path, content: bytes, message: str) -> None:
    (folder / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        loaded(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_index_may_not_leave_the_folder(folder: Path, name: str) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        loaded(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        loaded(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    shard(folder, save_file, ".safetensors", "model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing files: model-00002-of-00002"):
        loaded(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="missing files: model-00002-of-00002"):
        loaded(folder)


def test_a_name_that_promises_too_many_shards(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-999999999.safetensors").touch()
    with pytest.raises(CheckpointError, match="missing files: model-00002-of-999999999") as raised:
        find_files(tmp_path, (".safetensors",))
    assert len(str(raised.value)) < 5000


def test_tensor_that_only_the_index_knows(folder: Path) -> None:
    shard(folder, save_file, ".safetensors", "model")
    index = folder / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"from model-00001-of-00002\.s\S+ model\.extra"):
        loaded(folder)


def test_the_same_tensor_in_two_files(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight is also in another file, model\.s"):
        loaded(folder)


def test_the_index_says_which_of_two_is_meant(folder: Path) -> None:
    want = weights_of(loaded(folder))
    shard(folder, save_file, ".safetensors", "model")
    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(homes.values())):
        tensors = load_file(folder / file)
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            tensors.setdefault(name, torch.ones(3))
        save_file(tensors, folder / file)
    assert all(map(torch.equal, weights_of(loaded(folder)), want))


def test_no_weights_at_all(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / "training_args.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="holds no weights"):
        loaded(folder)
    with pytest.raises(CheckpointError, match="holds no model-rank-0"):
        loaded(folder, "sharded_state")
    with pytest.raises(ConfigError, match="--load-format 'magic'"):
        loaded(folder, "magic")


def test_obsolete_tensors_are_ignored(folder: Path) -> None:
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda t: t.update({extra: torch.ones(12)}))
    report = load_weights(empty_model(folder), folder, progress=False)
    assert report.ignored == (extra,)


def test_progress_bar_only_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_weights(empty_model(folder), folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_weights(empty_model(folder), folder)
    assert "loading weights: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", ""])
def test_a_decoder_inside_a_composite_checkpoint(folder: Path, prefix: str) -> None:
    """Names of LLaVA-like checkpoints, next to an encoder."""
    expected = weights_of(loaded(folder))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            inner = name.removeprefix("model.") if prefix == "model.language_model." else name
            is_outside = prefix == "model.language_model." and not name.startswith("model.")
            tensors[inner if is_outside else prefix + inner] = tensors.pop(name)
        tensors["vision_tower.conv.weight"] = torch.ones(3)

    change(folder, rename)
    model = empty_model(folder)
    report = load_weights(model, folder, progress=False)
    assert report.ignored == ("vision_tower.conv.weight",)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), expected, strict=True))


@pytest.mark.parametrize("as_bin", [False, True])
def test_a_tensor_that_fills_two_parameters(folder: Path, as_bin: bool) -> None:
    """A tied head with a bias is a separate parameter, so the table is read twice."""
    change(folder, lambda t: t.pop("lm_head.weight"))
    change(folder, lambda t: t.update({"lm_head.bias": torch.ones(384)}))
    if as_bin:
        as_pickle(folder)
    decoder = untied_with_bias(replace(describe(folder), tied=True, head_bias=True))
    kernels = bind("cpu", {"all": "reference"})
    model = build_model(decoder, CPU, torch.float32, kernels)
    load_weights(model, folder, progress=False)
    assert torch.equal(model.head.packed.unpack(), model.embed.unpack())
