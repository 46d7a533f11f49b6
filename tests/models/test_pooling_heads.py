"""Pooling heads without a Hugging Face class on Hugging Face bodies; pairs, prefixes, lengths, and
sentence-transformers folders; all through the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tests.arch import test_custom
from tests.arch.oracle import TINY
from tests.fakes.pooled_checkpoint import ENCODERS, HEADS, SHAPE, expected, made, oracle
from tests.fakes.tiny_checkpoint import TINY as TINY_SETTINGS
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.models.test_pooling import engine, prompts
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers.models.lfm2 import modeling_lfm2

from radixlm.arch.registry import ARCHITECTURES
from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest, PromptTooLong

DIM, MARK = 64, 7
Tensors = dict[str, Tensor]


def hidden(architecture: str, ids: list[int]) -> Tensor:
    """Last hidden states [T, D] of the body of a tiny causal model."""
    folder = cached_tiny(architecture)
    model = oracle(folder).base_model
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def linear(name: str, rows: int, columns: int = DIM, bias: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(len(name) * rows)
    made = {f"{name}.weight": torch.randn(rows, columns, generator=generator) * 0.3}
    return made | ({f"{name}.bias": torch.randn(rows, generator=generator)} if bias else {})


def apply(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


TWO_LAYERS = linear("score.0", DIM) | linear("score.2", 1)
STEPS = linear("score.0", DIM) | linear("score.2", 2)
NORMAL = linear("score", 6, bias=False) | {
    **linear("weights.fc.0", DIM),
    **linear("weights.fc.2", DIM),
    **linear("weights.fc.4", 3),
}
CLASSES = linear("classification_head", 4)
VALUE = linear("v_head", 1, bias=False)


def two_layers(tensors: Tensors, h: Tensor) -> Tensor:
    return apply(tensors, "score.2", apply(tensors, "score.0", h).relu())


def steps(h: Tensor, ids: list[int]) -> Tensor:
    places = [i for i, token in enumerate(ids) if token == MARK]
    return two_layers(STEPS, h[places]).softmax(-1)[:, 1]


def normal(h: Tensor, ids: list[int]) -> Tensor:
    gate = h[-1]
    for name in ("weights.fc.0", "weights.fc.2"):
        gate = F.selu(apply(NORMAL, name, gate))
    gate = apply(NORMAL, "weights.fc.4", gate)
    return (apply(NORMAL, "score", h[-1]).view(3, 2)[:, 0] * gate).sum()[None]


def marked(h: Tensor, ids: list[int]) -> Tensor:
    places = [i for i, token in enumerate(ids) if token == MARK] or [-1]
    return apply(CLASSES, "classification_head", h[places[-1]])


Head = Callable[[Tensor, list[int]], Tensor]
CASES: dict[str, tuple[str, dict[str, Any], Tensors, Head]] = {
    "Qwen2ForRewardModel": (
        "Qwen2ForCausalLM", {}, TWO_LAYERS, lambda h, ids: two_layers(TWO_LAYERS, h[-1])
    ),
    "Qwen3ForRewardModel": (
        "Qwen3ForCausalLM", {}, TWO_LAYERS, lambda h, ids: two_layers(TWO_LAYERS, h[-1])
    ),
    "Qwen2ForProcessRewardModel": ("Qwen2ForCausalLM", {"step_tag_id": MARK}, STEPS, steps),
    "LlamaForSequenceClassificationWithNormal_Weights": (
        "LlamaForCausalLM", {"num_labels": 6}, NORMAL, normal
    ),
    "LlamaForClassification": (
        "LlamaForCausalLM",
        {"classification_out_size": 4, "classification_bias": True, "eos_token_id": MARK},
        CLASSES,
        marked,
    ),
    "LlamaForRewardModel": (
        "LlamaForCausalLM", {}, VALUE, lambda h, ids: apply(VALUE, "v_head", h[-1])
    ),
    "LlamaEmbeddingModel": ("LlamaForCausalLM", {}, {}, lambda h, ids: F.normalize(h[-1], dim=0)),
}  # fmt: skip


def rebuilt(architecture: str, target: Path) -> Path:
    """The body's checkpoint with the head's tensors and name, without the language head."""
    base, changes, tensors, _ = CASES[architecture]
    folder = copy_tiny(cached_tiny(base), target)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(folder / "model.safetensors")
    save_file(held | tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("architecture", CASES)
def test_heads_without_a_class(architecture: str, tmp_path: Path) -> None:
    base, _, _, head = CASES[architecture]
    texts = prompts(architecture)
    texts[0][3] = texts[0][20] = texts[2][40] = MARK
    with engine(rebuilt(architecture, tmp_path / "m")) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
    for ids, vector in zip(texts, got, strict=True):
        assert vector == pytest.approx(head(hidden(base, ids), ids).tolist(), abs=1e-4)


def test_a_causal_model_embeds_by_flag_and_shares_prefixes(tmp_path: Path) -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    text = prompts("flag")[2]
    with engine(folder, is_embedding=True) as served:
        first, again = served.encode(input_ids=text), served.encode(input_ids=text)
        with pytest.raises(InvalidRequest, match="generates no text"):
            served.generate(input_ids=text)
    wanted = F.normalize(hidden("Qwen3ForCausalLM", text)[-1], dim=0)
    assert first["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert first["embedding"] == again["embedding"]
    assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (
        0,
        len(text) - 1,
    )
    with engine(folder) as served, pytest.raises(InvalidRequest, match="--is-embedding"):
        served.encode(input_ids=text)


def test_a_causal_model_may_attend_to_the_whole_text(tmp_path: Path) -> None:
    """`is_causal` false in the config, as in gte-Qwen2; the oracle runs without its mask."""
    folder = copy_tiny(made("Qwen2Model"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    text = prompts("seen")[0]
    model = transformers.Qwen2Model.from_pretrained(folder, attn_implementation="eager").eval()
    mask = torch.zeros(1, 1, len(text), len(text))
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([text]), attention_mask=mask).last_hidden_state[0]
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    config["architectures"] = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with engine(folder, is_embedding=True) as served:
        assert served.encode(input_ids=text)["embedding"] == got
    assert got == pytest.approx(F.normalize(out[-1], dim=0).tolist(), abs=1e-4)
    assert got != pytest.approx(expected(made("Qwen2Model"), text), abs=1e-2)


def test_voyage_projects_the_mean_of_a_bidirectional_qwen(tmp_path: Path) -> None:
    folder, text = copy_tiny(made("Qwen3Model"), tmp_path / "m"), prompts("voyage")[0]
    model = transformers.Qwen3Model.from_pretrained(folder, attn_implementation="eager").eval()
    mask = torch.zeros(1, 1, len(text), len(text))
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([text]), attention_mask=mask).last_hidden_state[0]
    projection = linear("linear", 96, bias=False)
    held = {f"model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(held | projection, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    wanted = F.normalize(apply(projection, "linear", out.mean(0)), dim=0)
    assert got == pytest.approx(wanted.tolist(), abs=1e-4)


def _centered(x: Tensor, weight: Tensor, bias: Tensor, **_: object) -> Tensor:
    """In place of transformers' causal convolution."""
    return F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] // 2, groups=len(weight))


@pytest.mark.parametrize("prefix", ["", "lfm2."])
def test_lfm2_as_an_encoder(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = copy_tiny(cached_tiny("Lfm2ForCausalLM"), tmp_path / "m"), prompts("lfm2")
    body, wanted = oracle(folder).base_model, []
    with torch.inference_mode(), monkeypatch.context() as patched:
        patched.setattr(modeling_lfm2, "causal_conv1d_fn", _centered)
        for ids in texts:
            masks = {"full_attention": torch.zeros(1, 1, len(ids), len(ids)), "conv": None}
            out = body(torch.tensor([ids]), attention_mask=masks, use_cache=False)
            wanted.append(F.normalize(out.last_hidden_state[0, 0], dim=0))
    held = load_file(folder / "model.safetensors")
    held = {prefix + name.removeprefix("model."): tensor for name, tensor in held.items()}
    save_file(held, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "Lfm2BidirectionalForMaskedLM" if prefix else "Lfm2BidirectionalModel"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with engine(folder) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
        alone = served.encode(input_ids=texts[0])["embedding"]
    for vector, states in zip(got, wanted, strict=True):
        assert vector == pytest.approx(states.tolist(), abs=1e-4)
    assert alone == got[0]


def _with_tasks(folder: Path, *tasks: str) -> Tensors:
    """Make the folder a Jina v5 checkpoint; what the first task's adapter adds, by weight."""
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["JinaEmbeddingsV5Model"]
    (folder / "config.json").write_text(json.dumps(config))
    held, added = load_file(folder / "model.safetensors"), Tensors()
    for number, task in enumerate(tasks):
        place, tensors = folder / "adapters" / task, Tensors()
        place.mkdir(parents=True)
        said = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
        (place / "adapter_config.json").write_text(json.dumps(said))
        for name in [one for one in held if "layers.0" in one and "q_proj" in one]:
            stem = "base_model.model." + name.removeprefix("model.").removesuffix(".weight")
            rows, columns = held[name].shape
            a, b = (
                linear("x", *shape, bias=False)["x.weight"] for shape in ((2, columns), (rows, 2))
            )
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b * (number + 1)}
            added.setdefault(name, 3.0 * (b @ a))
        save_file(tensors, place / "adapter_model.safetensors")
    return added


def test_jina_v5_merges_the_adapter_of_its_task(tmp_path: Path) -> None:
    folder, text = copy_tiny(made("Qwen3Model"), tmp_path / "m"), prompts("jina")[0]
    added = _with_tasks(folder, "retrieval", "clustering")
    assert added
    model = transformers.Qwen3Model.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        for name, more in added.items():
            model.get_parameter(name.removeprefix("model.")).add_(more)
        out = model(input_ids=torch.tensor([text])).last_hidden_state[0, -1]
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(F.normalize(out, dim=0).tolist(), abs=1e-4)
    path = folder / "config.json"
    plain = path.read_text()
    path.write_text(json.dumps(json.loads(plain) | {"jina_task": "clustering"}))
    with engine(folder) as served:
        assert served.encode(input_ids=text)["embedding"] != pytest.approx(got, abs=1e-3)
    path.write_text(json.dumps(json.loads(plain) | {"jina_task": "typing"}))
    with pytest.raises(CheckpointError, match="adapters: clustering, retrieval"), engine(folder):
        pass


def test_the_task_of_an_adapter_stands_in_config_json(tmp_path: Path) -> None:
    folder = copy_tiny(made("Qwen3Model"), tmp_path / "m")
    _with_tasks(folder, "retrieval")
    task = json.dumps({"jina_task": "retrieval"})
    with pytest.raises(ConfigError, match="jina_task"):
        engine(folder, json_model_override_args=task)


def test_models_without_bidirectional_attention_are_refused(tmp_path: Path) -> None:
    folder = copy_tiny(made("GptOssModel"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(CheckpointError, match="is_causal"), engine(folder):
        pass


def paired(folder: Path) -> Path:
    """The folder with a tokenizer that joins pairs as BERT's does."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    tokenizer.save(str(file))
    return folder


def test_a_cross_encoder_reads_pairs(tmp_path: Path) -> None:
    source = made("BertForSequenceClassification", num_labels=1)
    folder = paired(copy_tiny(source, tmp_path / "m"))
    pairs = [["how many?", "ten of them"], ["who", "the quick fox jumps over it"]]
    with engine(folder) as served:
        got = [one["embedding"] for one in served.rerank(pairs)]
        scores = served.score("how many?", ["ten of them", "none"])
        squashed = served.score("how many?", "ten of them", apply_softmax=True)
        swapped = served.score("ten of them", "how many?", item_first=True)
        whole = served.score(*pairs[0], return_pooled_hidden_states=True)
        tokenizer = served.tokenizer
    assert tokenizer is not None
    body = oracle(source).base_model
    ids, first_len = tokenizer.encode_pair(*pairs[0])
    types = torch.tensor([[0] * first_len + [1] * (len(ids) - first_len)])
    with torch.inference_mode():
        states = body(input_ids=torch.tensor([ids]), token_type_ids=types).last_hidden_state[0]
    assert whole == whole.scores == scores[:1] and whole.prompt_tokens == len(ids)
    assert whole.pooled_hidden_states[0] == pytest.approx(states[0].tolist(), abs=1e-4)
    assert scores.pooled_hidden_states is None
    for pair, vector in zip(pairs, got, strict=True):
        ids, first_len = tokenizer.encode_pair(*pair)
        assert ids[0] == 1 and ids.count(2) == 2 and ids[first_len - 1] == 2
        assert vector == pytest.approx(expected(source, ids, first_len), abs=1e-4)
        assert vector != pytest.approx(expected(source, ids), abs=1e-4), "types must matter"
    assert scores[0] == swapped[0] == got[0]
    assert squashed[0] == pytest.approx([1 / (1 + math.exp(-got[0][0]))])


def test_texts_fill_the_last_place_and_not_more(tmp_path: Path) -> None:
    folder = paired(
        copy_tiny(made("RobertaModel", max_position_embeddings=39, pad_token_id=0), tmp_path / "m")
    )
    with engine(folder) as served:
        full = served.encode(input_ids=[5] * 38)
        assert full["embedding"] == pytest.approx(expected(folder, [5] * 38), abs=1e-4)
        with pytest.raises(PromptTooLong, match="maximum context length is 38 tokens"):
            served.encode(input_ids=[5] * 39)
    with engine(folder, allow_auto_truncate=True) as served:
        cut = served.encode("fox " * 100)
        assert cut["meta_info"]["prompt_tokens"] == 38
        assert served.tokenizer is not None
        ids = served.tokenizer.encode("fox " * 100)
    wanted = expected(folder, [*ids[:37], 2])  # the last special token stays
    assert cut["embedding"] == pytest.approx(wanted, abs=1e-4)


def modules(folder: Path, *kinds: str, **configs: Any) -> Path:
    """The files of sentence-transformers next to a checkpoint."""
    listed = []
    for index, kind in enumerate(("Transformer", *kinds)):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        name = f"sentence_transformers.models.{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": name})
        if kind in configs:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(configs[kind]))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


POOLING = {"word_embedding_dimension": DIM, "pooling_mode_mean_tokens": True}
DENSE = {
    "in_features": DIM,
    "out_features": 24,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def test_a_sentence_transformers_folder_loads_as_it_is(tmp_path: Path) -> None:
    folder = copy_tiny(made("BertModel"), tmp_path / "m")
    modules(folder, "Pooling", "Dense", "Normalize", Pooling=POOLING, Dense=DENSE)
    dense = linear("linear", 24)
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    prompted = {"prompts": {"query": "fox: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompted))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 61}))
    text = prompts("dense")[0]
    with torch.inference_mode():
        mean = oracle(made("BertModel"))(torch.tensor([text])).last_hidden_state[0].mean(0)
    wanted = F.normalize(torch.tanh(apply(dense, "linear", mean)), dim=0)
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
        short = served.encode(input_ids=text, dimensions=8)["embedding"]
        asked = served.encode("ten", prompt_name="query")["embedding"]
        same = served.encode("fox: ten")["embedding"]
        plain = served.encode("ten", prompt_name="document")["embedding"]
        assert served.info.context_len == 61
        with pytest.raises(InvalidRequest, match="known: query, document"):
            served.encode("ten", prompt_name="answer")
    assert got == pytest.approx(wanted.tolist(), abs=1e-4)
    assert short == pytest.approx(F.normalize(wanted[:8], dim=0).tolist(), abs=1e-4)
    assert asked == same != plain


MASKED = ("Bert", "DistilBert", "Esm", "Esmc", "ModernBert", "MPNet", "RoFormer", "Roberta")


@pytest.mark.parametrize("stem", MASKED)
def test_a_masked_language_model_gives_vectors(stem: str) -> None:
    settings = ENCODERS[f"{stem}Model"]
    folder = made(f"{stem}ForMaskedLM", **settings)
    with torch.inference_mode():
        hidden = oracle(folder).base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    pooled = hidden.mean(0) if stem in ("Esm", "Esmc", "MPNet") else hidden[0]
    with engine(folder) as served:
        got = served.encode(input_ids=[5, 6, 7])["embedding"]
    assert got == pytest.approx(F.normalize(pooled, dim=0).tolist(), abs=1e-4)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "2_Dense/model.safetensors").unlink(), "2_Dense"),
    "another shape": (
        lambda f: save_file(linear("linear", 23), f / "2_Dense/model.safetensors"),
        "2_Dense/model.safetensors: linear.weight",
    ),
    "not JSON": (lambda f: (f / "1_Pooling/config.json").write_text("{"), "1_Pooling/config.json"),
    "no modules": (lambda f: (f / "modules.json").write_text("{}"), "modules.json"),
    "unknown module": (
        lambda f: (f / "modules.json").write_text('[{"type": "x.LSTM"}]'), "'LSTM'"
    ),
    "unknown pooling": (
        lambda f: (f / "1_Pooling/config.json").write_text('{"pooling_mode_odd_tokens": true}'),
        "odd_tokens",
    ),
    "unknown activation": (
        lambda f: (f / "2_Dense/config.json").write_text(
            json.dumps({**DENSE, "activation_function": "torch.nn.Odd"})
        ),
        "torch.nn.Odd",
    ),
    "other width": (
        lambda f: (f / "2_Dense/config.json").write_text(json.dumps({**DENSE, "in_features": 65})),
        "takes 65 channels, but gets 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    folder = copy_tiny(made("BertModel"), tmp_path / "m")
    modules(folder, "Pooling", "Dense", "Normalize", Pooling=POOLING, Dense=DENSE)
    save_file(linear("linear", 24), folder / "2_Dense" / "model.safetensors")
    harm, named = BROKEN[fault]
    harm(folder)
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")), engine(folder):
        pass


def test_the_first_names_of_norms_are_read(tmp_path: Path) -> None:
    folder = copy_tiny(made("BertModel"), tmp_path / "m")
    held = load_file(folder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        held = {key.replace(new, name): value for key, value in held.items()}
    assert any(key.endswith("gamma") for key in held)
    save_file(held, folder / "model.safetensors")
    text = prompts("old")[0]
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(expected(made("BertModel"), text), abs=1e-4)


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("BertForSequenceClassification", "classifier.bias"),
        ("BertModel", "embeddings.token_type_embeddings.weight"),
        ("MPNetModel", "encoder.relative_attention_bias.weight"),
        ("Qwen3ForSequenceClassification", "score.weight"),
    ],
)
def test_a_missing_tensor_is_named(architecture: str, tensor: str, tmp_path: Path) -> None:
    folder = copy_tiny(made(architecture), tmp_path / "m")
    held = load_file(folder / "model.safetensors")
    del held[tensor]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=tensor), engine(folder):
        pass


RENAMED = {
    "Contriever": ("BertModel", "mean"),
    "NewModel": ("GteModel", "cls"),
    "GteNewModel": ("GteModel", "cls"),
    "LlamaBidirectionalModel": ("LlamaModel", "mean"),
    "LlamaBidirectionalForSequenceClassification": ("LlamaModel", "mean"),
    "InternLM2ForRewardModel": ("InternLM2ForCausalLM", "last"),
}


@pytest.mark.parametrize("architecture", ["Contriever", "NewModel", "GteNewModel"])
def test_other_names_of_a_body(architecture: str, tmp_path: Path) -> None:
    base, pooling = RENAMED[architecture]
    folder = copy_tiny(made(base), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    if "New" in architecture:  # keys of the published checkpoints
        config |= {"model_type": "new", "rope_theta": config.pop("rope_parameters")["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    text = prompts(architecture)[0]
    with torch.inference_mode():
        out = oracle(made(base))(input_ids=torch.tensor([text])).last_hidden_state[0]
    wanted = out.mean(0) if pooling == "mean" else out[0]
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(F.normalize(wanted, dim=0).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_a_bidirectional_llama_averages(kind: str, tmp_path: Path) -> None:
    folder = copy_tiny(made("LlamaModel"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaBidirectional" + kind], "pooling": "avg", "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    score, text = linear("score", 1, bias=False), prompts("both ways")[0]
    save_file(load_file(folder / "model.safetensors") | score, folder / "model.safetensors")
    mask = torch.zeros(1, 1, len(text), len(text))
    with torch.inference_mode():
        model = oracle(made("LlamaModel"))
        out = model(input_ids=torch.tensor([text]), attention_mask=mask).last_hidden_state[0]
    mean = out.mean(0)
    wanted = F.normalize(mean, dim=0) if kind == "Model" else apply(score, "score", mean)
    with engine(folder) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(wanted.tolist(), abs=1e-4)


def test_the_reward_of_internlm2(tmp_path: Path) -> None:
    case = test_custom.CASES["InternLM2ForCausalLM"]
    model = test_custom.build(case, tmp_path)
    config = {"architectures": ["InternLM2ForRewardModel"], **TINY, **case.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | VALUE, tmp_path / "model.safetensors")
    text = prompts("reward")[0]
    with torch.inference_mode():
        last = model.model(torch.tensor([text])).last_hidden_state[0, -1]
    with engine(tmp_path, skip_tokenizer_init=True) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(apply(VALUE, "v_head", last).tolist(), abs=1e-4)


@pytest.mark.parametrize("end", [2, 5])
def test_clip_embeds_texts_by_their_end_token(end: int, tmp_path: Path) -> None:
    """`end` 2 is the value of old configs, where the end token is the last of the vocabulary."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 2}
    text = {**shape, "vocab_size": 64, "max_position_embeddings": 24, "eos_token_id": end}
    text |= {"bos_token_id": 0, "pad_token_id": 1}
    vision = {**shape, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = [0, 9, 8, 7, 63 if end == 2 else end]
    with torch.inference_mode():
        found = model.get_text_features(input_ids=torch.tensor([ids]))
    vector = found if isinstance(found, Tensor) else found.pooler_output
    with engine(tmp_path, skip_tokenizer_init=True) as served:
        got = served.encode(input_ids=ids)["embedding"]
    assert got == pytest.approx(F.normalize(vector[0], dim=0).tolist(), abs=1e-4)


_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
BESIDE_A_TOWER: dict[str, dict[str, Any]] = {
    "Gemma3ForSequenceClassification": {
        "vision_config": {**_SIGHT, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "Qwen3_5ForSequenceClassification": {
        "vision_config": {**_SIGHT, "depth": 1, "num_heads": 2, "patch_size": 4}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BESIDE_A_TOWER)
def test_scores_of_a_composite_text_model(architecture: str) -> None:
    """The text model's config is inside a composite config; a text needs no encoder."""
    stem = architecture.removesuffix("ForSequenceClassification")
    text = {**SHAPE, **HEADS[f"{stem}TextForSequenceClassification"]}
    nested = {**BESIDE_A_TOWER[architecture], "text_config": text, "num_labels": 3}
    folder = cached_tiny(architecture, **dict.fromkeys(TINY_SETTINGS), **nested)
    texts = prompts(architecture)
    with engine(folder) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
    for ids, vector in zip(texts, got, strict=True):
        assert vector == pytest.approx(expected(folder, ids), abs=1e-4)


def test_every_architecture_that_pools_is_tested() -> None:
    modules = ("bert", "encoders", "heads")
    known = {n for n, row in ARCHITECTURES.items() if row.partition(":")[0] in modules}
    same = {"NewForSequenceClassification", "EmbeddingGemmaModel", "CLIPTextModelWithProjection"}
    same |= {"GteNewForSequenceClassification"} | {n for n in known if n.endswith("ForMaskedLM")}
    # tests of their own
    same |= {n for n in known if n.endswith("ForTokenClassification")} | {
        "HF_ColBERT",
        "SiglipModel",
        "Siglip2Model",
        "NanbeigeForSequenceClassification",
        "VoyageQwen3BidirectionalEmbedModel",
        "JinaEmbeddingsV5Model",
        "Lfm2BidirectionalModel",
    }
    tested = {*ENCODERS, *HEADS, *CASES, *RENAMED, *BESIDE_A_TOWER, "CLIPModel"}
    assert known == tested | same
