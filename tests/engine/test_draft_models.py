"""Draft models in the engine: found, checked, loaded; tokens are those of a run without them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixlm import Engine
from radixlm.arch.hf import describe, describe_draft
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine import draft_model
from radixlm.engine.draft_fit import algorithm_of, check_fit, check_vocabulary, completed
from radixlm.engine.draft_model import find_draft, head_in, kept_ids
from radixlm.engine.model_info import ASSETS, ZOO, read_model
from radixlm.speculative.device.model_drafter import ModelDrafter
from radixlm.speculative.lengths import DraftLength
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.models.test_mtp_families import CASES as FAMILIES
from tests.models.test_mtp_families import with_block

TARGET, DRAFT, HEAD = ASSETS / "radix-tiny", ZOO / "radix-tiny-draft", ZOO / "radix-tiny-eagle3"
NEEDS_MODELS = pytest.mark.skipif(
    not all((folder / "config.json").is_file() for folder in (TARGET, DRAFT, HEAD)),
    reason="the bundled model or its drafts are not built",
)


class Rounds(DraftLength):
    """Drafts always, and counts what becomes of it."""

    def __init__(self, max_drafts: int, *_: Any) -> None:
        super().__init__(max_drafts, is_fixed=True, always=True)

    def observe(self, rid: str, drafted: int, accepted: int) -> None:
        super().observe(rid, drafted, accepted)
        self.seen.append((drafted, accepted))

    seen: list[tuple[int, int]] = []  # noqa: RUF012  (of one test)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", Rounds)
    Rounds.seen.clear()
    yield Rounds.seen
    Rounds.seen.clear()


def generate(prompts: list[list[int]], **options: Any) -> list[list[int]]:
    sampling = options.pop("sampling", {"temperature": 0, "max_new_tokens": 96})
    params = [{**sampling, "sampling_seed": n} for n in range(len(prompts))]
    with Engine(**{"max_total_tokens": 16384, "cpu_threads": 1} | options) as engine:
        answers = engine.generate(input_ids=prompts, sampling_params=params)
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out prompts of the zoo."""
    zoo = str(ZOO.parent)
    sys.path.insert(0, zoo)
    try:
        from chat import Encoder, render
        from data import EVALUATIONS, evaluation
    finally:
        sys.path.remove(zoo)
    encoder = Encoder(TARGET / "tokenizer.json")
    tasks = [task for task in EVALUATIONS if task != "passage-long"]
    items = [evaluation(tasks[i % len(tasks)], 5000 + i) for i in range(48)]
    return [
        encoder.ids(render(i, prompt_only=True, thinking=i.task.endswith("-think"))) for i in items
    ]


def tokens_a_round(rounds: list[tuple[int, int]]) -> float:
    return 1 + sum(accepted for _, accepted in rounds) / len(rounds)


@NEEDS_MODELS
def test_drafts_of_the_bundled_model_are_accepted(
    prompts: list[list[int]], rounds: list[tuple[int, int]]
) -> None:
    """As often as by the zoo's own code (zoo/speculation.py 2.66, zoo/eagle.py 2.30 of these
    prompts, in 16 bits), which a tap off by one or a shifted position would not reach."""
    plain = generate(prompts)
    for algorithm, least in (("STANDALONE", 2.6), ("EAGLE3", 2.25), ("EAGLE", 2.25)):
        rounds.clear()
        assert generate(prompts, speculative_algorithm=algorithm, speculative_num_steps=3) == plain
        assert tokens_a_round(rounds) > least, algorithm


@NEEDS_MODELS
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
@pytest.mark.parametrize(
    ("sampling", "least"),
    [
        ({"temperature": 1.0, "top_p": 0.9}, 2.2),
        ({"temperature": 1.6, "frequency_penalty": 0.3}, 1.4),
        ({"temperature": 3.0}, 1.2),
    ],
)
def test_sampled_tokens_are_those_without_drafts(
    algorithm: str,
    sampling: dict[str, float],
    least: float,
    prompts: list[list[int]],
    rounds: list[tuple[int, int]],
) -> None:
    options = {"sampling": {**sampling, "max_new_tokens": 40}, "chunked_prefill_size": 64}
    plain = generate(prompts[:12], **options)
    drafted = {"speculative_algorithm": algorithm, "speculative_num_steps": 3}
    assert generate(prompts[:12], **drafted, **options) == plain
    assert tokens_a_round(rounds) > least


@NEEDS_MODELS
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8", "page_size": 64},
        {"quantization": "int4wo-32", "max_total_tokens": 700},
        {"quantization": "int8wo", "speculative_draft_model_quantization": "unquant"},
        {"speculative_draft_model_quantization": "int8wo"},
        {"attention_backend": "torch_native", "page_size": 1, "disable_radix_cache": True},
    ],
)
def test_formats_and_pages(
    options: dict[str, Any], prompts: list[list[int]], rounds: list[tuple[int, int]]
) -> None:
    own = {name: value for name, value in options.items() if "speculative" not in name}
    plain = generate(prompts[:16], **own)
    for algorithm, least in (("STANDALONE", 2.4), ("EAGLE3", 2.0)):
        rounds.clear()
        drafted = {"speculative_algorithm": algorithm, "speculative_num_steps": 3}
        assert generate(prompts[:16], **drafted, **options) == plain
        assert tokens_a_round(rounds) > least, algorithm


@NEEDS_MODELS
@pytest.mark.parametrize("asked", [None, "unquant"])
def test_wide_drafts_are_read_in_8_bits(
    asked: str | None,
    prompts: list[list[int]],
    rounds: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    inner = draft_model.make_scheme

    def make(*names: Any) -> Any:
        made.append(str(names[0]))
        return inner(*names)

    monkeypatch.setattr(draft_model, "make_scheme", make)
    plain = generate(prompts[:8])
    for wide, expected in ((1 << 20, asked), (1, asked or "int8wo")):
        monkeypatch.setattr(draft_model, "WIDE", wide)
        drafted = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
        drafted |= {} if asked is None else {"speculative_draft_model_quantization": asked}
        assert generate(prompts[:8], **drafted) == plain
        assert made.pop() == str(expected) and not made
    assert tokens_a_round(rounds) > 2.0


@NEEDS_MODELS
def test_prefixes_keep_the_entries_of_drafts(rounds: list[tuple[int, int]]) -> None:
    """Requests that share cached pages draft as well as the one that computed them."""
    text = "List the days of the week, then list them again in the same order. " * 6
    drafted: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    with Engine(max_total_tokens=8192, cpu_threads=1, **drafted) as engine:
        shares = []
        for _ in range(3):
            rounds.clear()
            answer = engine.generate(text, {"temperature": 0, "max_new_tokens": 48})
            shares.append((answer["output_ids"], tokens_a_round(rounds)))
        assert answer["meta_info"]["cached_tokens"] > 64
    assert shares[0][0] == shares[1][0] == shares[2][0]
    assert min(share for _, share in shares[1:]) > shares[0][1] - 0.35


def with_layers(architecture: str, folder: Path, old: str, at: str, **names: str) -> str:
    """A tiny checkpoint with a prediction layer that is a copy of the layer ``old``, at ``at``;
    ``names``: of the projection, and of the norms (joined by commas) with ``gain`` 0 or 1."""
    copy_tiny(cached_tiny(architecture), folder)
    tensors = load_file(folder / "model.safetensors")
    block = {at + n.removeprefix(old): t.clone() for n, t in tensors.items() if n.startswith(old)}
    dim, gain = tensors["model.norm.weight"].shape[0], float(names.get("gain", "1"))
    own = {f"{name}.weight": torch.full((dim,), gain) for name in names["norms"].split(",")}
    own[f"{names['join']}.weight"] = torch.randn(dim, 2 * dim) * 0.1
    save_file({**tensors, **block, **own}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return str(folder)


DEEPSEEK = (
    "DeepseekV3ForCausalLM",
    "model.layers.2.",
    "model.layers.3.",
    {
        "join": "model.layers.3.eh_proj",
        "norms": "model.layers.3.enorm,model.layers.3.hnorm,model.layers.3.shared_head.norm",
    },
)
QWEN_NORMS = "mtp.pre_fc_norm_embedding,mtp.pre_fc_norm_hidden,mtp.norm"
QWEN_NEXT = (
    "Qwen3NextForCausalLM",
    "model.layers.1.",
    "mtp.layers.0.",
    {"join": "mtp.fc", "norms": QWEN_NORMS, "gain": "0"},
)


@pytest.mark.parametrize("options", [{}, {"page_size": 16, "chunked_prefill_size": 8}], ids=str)
@pytest.mark.parametrize("case", [DEEPSEEK, QWEN_NEXT], ids=lambda case: case[0])
def test_prediction_layers_draft_for_their_model(
    case: tuple[str, str, str, dict[str, str]],
    options: dict[str, Any],
    tmp_path: Path,
    rounds: list[tuple[int, int]],
) -> None:
    """Random weights: little is accepted, and every token stays the same."""
    architecture, old, at, names = case
    path = with_layers(architecture, tmp_path / "model", old, at, **names)
    prompts = [[3 + (7 * n + k) % 300 for k in range(20 + n)] for n in range(3)]
    options = {
        "model_path": path,
        "sampling": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        **options,
    }
    plain = generate(prompts, **options)
    assert generate(prompts, speculative_algorithm="NEXTN", **options) == plain
    assert rounds
    assert all(drafted > 0 for drafted, _ in rounds)
    sampled = options | {"sampling": {"temperature": 1.3, "max_new_tokens": 24}}
    assert generate(prompts, speculative_algorithm="NEXTN", **sampled) == generate(
        prompts, **sampled
    )


@pytest.mark.parametrize("architecture", FAMILIES)
def test_prediction_layers_of_other_families(
    architecture: str, tmp_path: Path, rounds: list[tuple[int, int]]
) -> None:
    """Layers that read the hidden states before the last norm, or all residual streams."""
    prompts = [[3 + (7 * n + k) % 300 for k in range(20 + n)] for n in range(3)]
    options: dict[str, Any] = {
        "model_path": str(with_block(architecture, tmp_path / "model")[0]),
        "sampling": {"temperature": 0.8, "max_new_tokens": 16, "ignore_eos": True},
        "chunked_prefill_size": 8,
    }
    plain = generate(prompts, **options)
    assert generate(prompts, speculative_algorithm="NEXTN", **options) == plain
    assert rounds and all(drafted > 0 for drafted, _ in rounds)


def test_each_prediction_layer_drafts_one_token_further(
    tmp_path: Path, rounds: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four drafts, the first is of the first layer, the others of the second."""
    architecture, old, at, names = DEEPSEEK
    folder = Path(with_layers(architecture, tmp_path / "model", old, at, **names))
    tensors, following = load_file(folder / "model.safetensors"), "model.layers.4."
    second = {n.replace(at, following): t.clone() for n, t in tensors.items() if n.startswith(at)}
    second[following + "eh_proj.weight"] = -second[following + "eh_proj.weight"]
    save_file({**tensors, **second}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    numbers: list[int] = []
    batch = ModelDrafter._batch

    def seen(self: ModelDrafter, number: int, *rest: Any) -> Any:
        numbers.append(number)
        return batch(self, number, *rest)

    monkeypatch.setattr(ModelDrafter, "_batch", seen)
    prompts = [[3 + (7 * n + k) % 300 for k in range(20 + n)] for n in range(3)]
    options: dict[str, Any] = {
        "model_path": str(folder),
        "sampling": {"temperature": 0.8, "max_new_tokens": 24, "ignore_eos": True},
        "chunked_prefill_size": 8,
    }
    plain = generate(prompts, **options)
    nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 4}
    assert generate(prompts, **nextn, **options) == plain
    assert max(drafted for drafted, _ in rounds) == 4
    assert "01110111" in "".join(map(str, numbers))


@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "BambaForCausalLM", "MambaForCausalLM"]
)
def test_a_model_with_states_gets_drafts_of_another(
    architecture: str, rounds: list[tuple[int, int]]
) -> None:
    """The draft model is a small one with the same tokenizer."""
    draft = cached_tiny("Qwen3ForCausalLM")
    prompts = [[3 + (7 * n + k) % 300 for k in range(20 + n)] for n in range(3)]
    for sampling in ({"temperature": 0, "ignore_eos": True}, {"temperature": 1.5}):
        options: dict[str, Any] = {
            "model_path": str(cached_tiny(architecture)),
            "sampling": {**sampling, "max_new_tokens": 40},
        }
        plain, drafted = (
            generate(prompts, **options),
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": str(draft),
                "speculative_num_steps": 2,
            },
        )
        assert generate(prompts, **drafted, **options) == plain
    assert any(accepted for _, accepted in rounds)
    assert any(accepted < drafted for drafted, accepted in rounds)


# ---- errors ------------------------------------------------------------------------------------


def config_of(algorithm: str, **options: Any) -> ServerConfig:
    return ServerConfig.from_kwargs(speculative_algorithm=algorithm, **options)


@NEEDS_MODELS
@pytest.mark.parametrize(
    ("algorithm", "path", "expected"),
    [
        ("NEXTN", None, r"no prediction layers of its own.*NGRAM works"),
        ("EAGLE3", "/nowhere", r"--speculative-draft-model-path '/nowhere': there is no such file"),
        ("EAGLE", "radix-tiny-draft", r"holds a model, not a head.*STANDALONE works"),
        ("STANDALONE", "radix-tiny-eagle3", r"holds a head.*EAGLE3 works"),
        ("STANDALONE", "radix-tiny-embed", r"does not generate text"),
    ],
)
def test_wrong_folders(algorithm: str, path: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Engine(speculative_algorithm=algorithm, speculative_draft_model_path=path)


@NEEDS_MODELS
def test_an_unknown_quantization_of_the_draft() -> None:
    with pytest.raises(ConfigError, match=r"draft-model-quantization int3 is not .*, unquant"):
        Engine(speculative_algorithm="EAGLE3", speculative_draft_model_quantization="int3")


@NEEDS_MODELS
def test_a_head_without_its_own_kind_of_algorithm(tmp_path: Path) -> None:
    config = json.loads((HEAD / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"EAGLE3: .* holds a head of kind EAGLE; EAGLE works"):
        Engine(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path))


def test_a_head_with_the_architecture_of_its_model(tmp_path: Path) -> None:
    """As EAGLE's authors publish it."""
    folder, config = copy_tiny(cached_tiny("LlamaForCausalLM"), tmp_path / "head"), ServerConfig()
    assert head_in(config, folder) is None
    tensors = load_file(folder / "model.safetensors") | {"fc.weight": torch.zeros(64, 128)}
    save_file(tensors, folder / "model.safetensors")
    assert algorithm_of(head_in(config, folder)) == "EAGLE"
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"draft_vocab_size": 40}))
    assert algorithm_of(head_in(config, folder)) == "EAGLE3"


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_files_say_whether_there_are_prediction_layers(architecture: str) -> None:
    folder = cached_tiny(architecture)
    config = config_of("NEXTN", model_path=str(folder))
    assert describe_draft(folder) is not None
    with pytest.raises(ConfigError, match="no prediction layers of its own"):
        find_draft(config, read_model(config)[0])


@NEEDS_MODELS
def test_a_head_for_another_model() -> None:
    spec, target = describe_draft(HEAD), describe(TARGET)
    assert spec is not None
    check_fit(spec, HEAD, target, "Target")
    padded = replace(spec, has_vocab_map=True, target_vocab=2064)
    check_fit(padded, HEAD, target, "Target")
    cases = {
        r"hidden states of 256 channels, Target has 512": (spec, replace(target, dim=512)),
        r"hidden states of 99 channels, Target has 256": (replace(spec, target_dim=99), target),
        r"a vocabulary of 2048 tokens, Target has 2000": (spec, replace(target, vocab=2000)),
        r"a vocabulary of 3000 tokens, Target has 2048": (
            replace(spec, has_vocab_map=True, target_vocab=3000), target,
        ),
        r"behind layers \[0, 2, 4\], Target has 4 layers": (
            spec, replace(target, blocks=target.blocks[:4]),
        ),
    }  # fmt: skip
    for expected, (head, model) in cases.items():
        with pytest.raises(ConfigError, match=expected):
            check_fit(head, HEAD, model, "Target")
    with pytest.raises(ConfigError, match=r"head has 40 tokens and no tensor 'd2t'"):
        small = replace(spec, decoder=replace(spec.decoder, vocab=40), has_vocab_map=True)
        completed(small, HEAD, frozenset({"lm_head.weight"}))


@NEEDS_MODELS
def test_the_vocabularies_are_compared(tmp_path: Path) -> None:
    config = config_of("STANDALONE", model_path=str(TARGET))
    info, decoder = read_model(config)[0], describe(DRAFT)
    check_vocabulary(config, info, DRAFT, decoder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DRAFT / file, tmp_path / file)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    plain = sorted(set(vocab.values()) - {one["id"] for one in data["added_tokens"]})
    moved = dict(zip(plain[:60], plain[60:120], strict=True))
    moved |= {new: old for old, new in moved.items()}
    data["model"]["vocab"] = {text: moved.get(i, i) for text, i in vocab.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"only 1928 of its first 2048 tokens .* same tokenizer"):
        check_vocabulary(config, info, tmp_path, decoder)


@NEEDS_MODELS
@pytest.mark.parametrize(("ids", "expected"), [([5, 9999], "5 to 9999"), ([], "none")])
def test_token_maps(ids: list[int], expected: str, tmp_path: Path) -> None:
    config = json.loads((HEAD / "config.json").read_text())
    shared = describe_draft({**config, "draft_vocab_size": None})
    assert shared is not None
    target, path = describe(TARGET), str(tmp_path / "map.pt")
    flag = config_of("EAGLE", speculative_token_map=path)
    torch.save([7, 3, 2047], path)
    found = kept_ids(flag, shared, target, torch.device("cpu"))
    assert found is not None and found.tolist() == [7, 3, 2047]
    torch.save(ids, path)
    with pytest.raises(ConfigError, match=f"token-map .* token ids {expected}, the model has 2048"):
        kept_ids(flag, shared, target, torch.device("cpu"))
    (tmp_path / "map.pt").write_text("no torch file")
    with pytest.raises(ConfigError, match="not a file of torch with token ids"):
        kept_ids(flag, shared, target, torch.device("cpu"))


@NEEDS_MODELS
def test_drafts_that_are_found_without_a_flag() -> None:
    info = read_model(config_of("EAGLE3"))[0]
    assert find_draft(config_of("EAGLE3"), info).name == "radix-tiny-eagle3"
    assert find_draft(config_of("STANDALONE"), info).name == "radix-tiny-draft"
