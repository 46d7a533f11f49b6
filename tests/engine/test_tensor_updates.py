"""Weights that a program sends to a running engine. The flows are those of SGLang's tests
test_update_weights_from_tensor, test_update_weights_from_distributed, test_get_weights_by_name."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import tempfile
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from radixlm import Engine
from radixlm.base.errors import InvalidRequest
from radixlm.weights_client import checksums
from tests.engine.test_live_weights import GREEDY, OPTIONS, PROMPTS
from tests.engine.test_weight_groups import free_port
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.fakes.trainer import Trainer

UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def base() -> Path:
    return cached_tiny("Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def old(base: Path) -> dict[str, Tensor]:
    return load_file(base / "model.safetensors")


@pytest.fixture(scope="module")
def new(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = perturbed(base, tmp_path_factory.mktemp("perturbed") / "new")
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def started(base: Path) -> Iterator[Engine]:
    with Engine(model_path=str(base), **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(started: Engine, base: Path) -> Engine:
    """With the weights of ``base``."""
    assert started.update_weights_from_disk(str(base))[0]
    return started


@pytest.fixture(scope="module")
def wanted(new: dict[str, Tensor], base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of an engine that starts with ``new``."""
    folder = perturbed(base, tmp_path_factory.mktemp("fresh") / "new")
    with Engine(model_path=str(folder), **OPTIONS) as engine:
        return answers(engine)


def answers(engine: Engine) -> Any:
    found = engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    keys = ("input_token_logprobs", "output_token_logprobs")
    return [(one["output_ids"], [one["meta_info"][key] for key in keys]) for one in found]


def shown(engine: Engine, name: str) -> Tensor:
    return torch.tensor(engine.get_weights_by_name(name, 1 << 20))


# ---- from tensors --------------------------------------------------------------------------


def test_all_tensors_give_the_answers_of_a_fresh_engine(
    engine: Engine, new: dict[str, Tensor], old: dict[str, Tensor], wanted: Any
) -> None:
    before = answers(engine)
    is_ok, message = engine.update_weights_from_tensor(list(new.items()), weight_version="7")
    assert is_ok and "7" in message
    assert answers(engine) == wanted != before
    answer = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert answer["meta_info"]["weight_version"] == "7"
    assert asyncio.run(engine.async_update_weights_from_tensor(old))[0]
    assert answers(engine) == before


def test_some_tensors_of_one_storage(engine: Engine, old: dict[str, Tensor]) -> None:
    """As the reference's test: one tensor under several names, which share its memory."""
    names = [UP.format(layer) for layer in range(2)]
    tensor = torch.full_like(old[names[0]], 1.5)
    assert engine.update_weights_from_tensor([(name, tensor) for name in names])[0]
    for name in old:
        expected = tensor if name in names else old[name]
        assert torch.equal(shown(engine, name), expected.float())


def _bucket(tensors: dict[str, Tensor], as_bytes: bool) -> dict[str, Any]:
    """The reference's FlattenedTensorBucket, of one dtype or of bytes."""
    parts = [one.reshape(-1) for one in tensors.values()]
    parts = [one.view(torch.uint8) for one in parts] if as_bytes else parts
    metadata, at = [], 0
    for (name, one), part in zip(tensors.items(), parts, strict=True):
        place = {"start_idx": at, "end_idx": (at := at + part.numel()), "numel": part.numel()}
        metadata.append(SimpleNamespace(name=name, shape=one.shape, dtype=one.dtype, **place))
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_flattened_bucket(engine: Engine, new: dict[str, Tensor], as_bytes: bool) -> None:
    some = {name: new[name] for name in (UP.format(1), "model.norm.weight")}
    bucket = _bucket(some, as_bytes)
    assert engine.update_weights_from_tensor([bucket], load_format="flattened_bucket")[0]
    assert all(torch.equal(shown(engine, name), one.float()) for name, one in some.items())
    del bucket["metadata"][0].dtype
    is_ok, message = engine.update_weights_from_tensor(bucket, "flattened_bucket")
    assert not is_ok and "flattened_bucket" in message


def test_fused_names_of_the_reference(engine: Engine, old: dict[str, Tensor]) -> None:
    """load_format "direct" of the reference's test writes qkv_proj and reads k_proj."""
    at = "model.layers.1."
    parts = [old[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]
    fused = torch.full_like(torch.cat(parts), 1.5)
    up = torch.cat([old[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")]) + 1
    sent = [(f"{at}self_attn.qkv_proj.weight", fused), (f"{at}mlp.gate_up_proj.weight", up)]
    is_ok, message = engine.update_weights_from_tensor(sent, load_format="direct")
    assert is_ok, message
    assert torch.equal(
        shown(engine, f"{at}self_attn.k_proj.weight"), torch.full_like(parts[1], 1.5).float()
    )
    rows = old[f"{at}mlp.gate_proj.weight"].shape[0]
    assert torch.equal(shown(engine, f"{at}mlp.up_proj.weight"), up[rows:].float())
    is_ok, message = engine.update_weights_from_tensor([(sent[0][0], fused[:-1])])
    assert not is_ok and f"its parts have {len(fused)} rows together" in message


@pytest.mark.parametrize("form", ["text", "bytes"])
def test_what_the_reference_serializes_is_refused_by_name(
    engine: Engine, old: dict[str, Tensor], form: str
) -> None:
    out = io.BytesIO()
    ForkingPickler(out).dump([("a", [1.0])])
    data: Any = out.getvalue()
    sent = [base64.b64encode(data).decode()] if form == "text" else [data]
    for load_format in (None, "flattened_bucket"):
        is_ok, message = engine.update_weights_from_tensor(sent, load_format)
        assert not is_ok and "MultiprocessingSerializer" in message
        assert "safetensors.torch.save" in message
    safe: Any = save({"model.norm.weight": old["model.norm.weight"] * 2})
    sent = [base64.b64encode(safe).decode()] * 2 if form == "text" else [safe]
    assert engine.update_weights_from_tensor(sent)[0]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown": ([("model.more", torch.ones(2))], {}, "safetensors: model.more"),
    "shape": ([(UP.format(0), torch.ones(3, 3))], {}, "[3, 3]"),
    "nan": ([("model.norm.weight", torch.full((64,), torch.nan))], {}, "NaN"),
    "no tensors": ([], {}, "no tensors"),
    "no tensor": ([("a", None)], {}, "named_tensors"),
    "format": ([("a", torch.ones(1))], {"load_format": "mine"}, "'direct', 'flattened_bucket'"),
    "option": ([("a", torch.ones(1))], {"mode": "later"}, "mode: 'later'"),
    "argument": ([("a", torch.ones(1))], {"weights": 1}, "weights: no argument of this call"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_update_leaves_the_old_weights(case: str, engine: Engine) -> None:
    tensors, options, words = BAD[case]
    before, digests = answers(engine), engine.check_weights()
    is_ok, message = engine.update_weights_from_tensor(tensors, **options)
    assert not is_ok and words in message
    assert answers(engine) == before and engine.check_weights() == digests


def test_many_updates_become_one(
    engine: Engine, new: dict[str, Tensor], wanted: Any, old: dict[str, Tensor]
) -> None:
    before, half = answers(engine), len(new) // 2
    assert engine.begin_weight_update()[0]
    assert not engine.begin_weight_update()[0]
    assert not engine.begin_weight_update("draft")[0]
    items = list(new.items())
    assert engine.update_weights_from_tensor(old, weight_version="8")[0]
    assert engine.update_weights_from_tensor(items[:half])[0]
    assert answers(engine) == before
    assert engine.update_weights_from_tensor(items[half:])[0]
    is_ok, message = engine.end_weight_update()
    assert is_ok and "8" in message
    assert answers(engine) == wanted
    assert not engine.end_weight_update()[0]
    assert engine.begin_weight_update()[0]
    assert engine.update_weights_from_tensor(old)[0]
    assert engine.end_weight_update(discard=True) == (True, "dropped")
    assert answers(engine) == wanted


def test_digests_are_those_of_what_a_trainer_has(
    engine: Engine, old: dict[str, Tensor], new: dict[str, Tensor]
) -> None:
    assert engine.check_weights()["checksums"] == checksums(old)
    assert engine.check_weights("snapshot")["checksums"] == checksums(old)
    assert engine.check_weights("compare") == {"num_equal": len(old)}
    name = "model.norm.weight"
    assert engine.update_weights_from_tensor([(name, new[name])])[0]
    assert engine.check_weights()["checksums"] == checksums({**old, name: new[name]})
    with pytest.raises(InvalidRequest, match=r"1 tensors differ from the snapshot: model\.norm"):
        engine.check_weights("compare")
    with pytest.raises(InvalidRequest, match="'reset_tensors' is none of checksum, snapshot"):
        engine.check_weights("reset_tensors")
    whole = "".join(f"{key}{value}" for key, value in sorted(checksums(old).items()))
    assert engine.update_weights_from_tensor([(name, old[name])])[0]
    digest = engine.check_weights()["per_gpu_checksum"]
    assert digest == hashlib.sha256(whole.encode()).hexdigest()


def test_a_tied_head_is_shown_under_both_names(engine: Engine, base: Path) -> None:
    folder = cached_tiny("Gemma3ForCausalLM")
    with Engine(model_path=str(folder), **OPTIONS) as tied:
        assert torch.equal(shown(tied, "lm_head.weight"), shown(tied, "model.embed_tokens.weight"))
        assert tied.get_weights_by_name("model.nothing") is None
    assert engine.get_weights_by_name("model.nothing.lm_head.weight") is None


# ---- from a group --------------------------------------------------------------------------


def test_a_trainer_broadcasts(
    engine: Engine, new: dict[str, Tensor], wanted: Any, tmp_path: Path
) -> None:
    """As the reference's test, over gloo: the trainer is a process and rank 0."""
    save_file(new, tmp_path / "new.safetensors")
    names = sorted(new)
    sent = {"path": str(tmp_path / "new.safetensors"), "names": names}
    what: Any = (names, [new[name].dtype for name in names], [new[name].shape for name in names])
    before, port = answers(engine), free_port()
    assert not engine.update_weights_from_distributed(*what, group_name="test")[0]
    with Trainer() as trainer:
        trainer.tell("join", port=port, world_size=2, group="test")
        joined = engine.init_weights_update_group(
            "localhost", str(port), rank_offset=1, world_size=2, group_name="test", backend="gloo"
        )
        assert joined == (True, "Succeeded to initialize custom process group.")
        assert trainer.answer() == "ok"
        trainer.tell("send", **sent)
        assert engine.update_weights_from_distributed(*what, group_name="test")[0]
        assert trainer.answer() == "ok" and answers(engine) == wanted
        assert engine.update_weights_from_disk(engine.config.model.model_path)[0]
        assert answers(engine) == before
        trainer.tell("bucket", **sent)
        format_ = {"group_name": "test", "load_format": "flattened_bucket"}
        assert asyncio.run(engine.async_update_weights_from_distributed(*what, **format_))[0]
        assert trainer.answer() == "ok" and answers(engine) == wanted
        trainer.kill()
        is_ok, message = engine.update_weights_from_distributed(*what, group_name="test")
        assert not is_ok and "make the group anew" in message
    assert answers(engine) == wanted
    assert not engine.destroy_weights_update_group("test")[0]


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "says"),
    [
        (["a"], ["bfloat16"], [], "one entry for each tensor"),
        (["a", "a"], ["half", "half"], [[1], [1]], "each name once"),
        (["a"], ["int3"], [[1]], "the dtype 'int3'"),
        (["a"], ["half"], [1], "names: "),
        ([], [], [], "name at least one tensor"),
    ],
)
def test_what_describes_no_tensors_is_refused(
    engine: Engine, names: Any, dtypes: Any, shapes: Any, says: str
) -> None:
    is_ok, message = engine.update_weights_from_distributed(names, dtypes, shapes)
    assert not is_ok and says in message


def test_a_mode_that_is_none_is_refused_before_tensors_are_written(
    engine: Engine, old: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    is_ok, message = engine.update_weights_from_tensor(old, mode="later")
    assert not is_ok and "mode: 'later' is none of wait" in message
    assert not list(tmp_path.iterdir())
