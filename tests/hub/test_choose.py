"""Which files of a repository are needed."""

import pytest

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.hub.choose import choose, gguf_files, missing_parts
from radixlm.hub.locate import Wanted, locate_model, scheme_of, split_repo

SMALL = ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"]
JUNK = ["README.md", "LICENSE.txt", "model.onnx", "onnx/model.onnx", "tf_model.h5", "run.py"]
JUNK += ["original/consolidated.00.pth", "optimizer.bin", "training_args.bin", "a.png"]
GGUF = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", "m-IQ4_XS.gguf"]


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [
        ("auto", ["model.safetensors"]),
        ("safetensors", ["model.safetensors"]),
        ("pt", ["pytorch_model.bin"]),
        ("npcache", ["pytorch_model.bin"]),
        ("dummy", []),
    ],
)
def test_one_format_of_weights_and_no_junk(load_format: str, weights: list[str]) -> None:
    names = [*SMALL, *JUNK, "model.safetensors", "pytorch_model.bin", "consolidated.safetensors"]
    assert sorted(choose(names, Wanted(load_format=load_format))) == sorted([*SMALL, *weights])


def test_bin_where_there_are_no_safetensors_then_pt() -> None:
    assert "pytorch_model.bin" in choose([*SMALL, "pytorch_model.bin", "x.pt"], Wanted())
    assert "x.pt" in choose([*SMALL, "x.pt"], Wanted())


def test_the_index_says_which_shards() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = [*SMALL, *shards, "model.safetensors", "model.safetensors.index.json"]
    found = choose(names, Wanted(), "", shards)
    assert set(found) == {*SMALL, *shards, "model.safetensors.index.json"}
    assert missing_parts(shards[:1]) == shards[1:] and not missing_parts(shards)


def test_folders_of_sentence_transformers() -> None:
    names = [*SMALL, "model.safetensors", "modules.json", "2_Dense/config.json"]
    names += ["2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"]
    assert set(choose(names, Wanted())) == set(names) - {"2_Dense/pytorch_model.bin"}


def test_adapters_of_tasks() -> None:
    own = [f"adapters/clustering/adapter_{end}" for end in ("config.json", "model.safetensors")]
    names = [*SMALL, "model.safetensors", *own, "adapters/clustering/optimizer.pt"]
    assert set(own) <= set(choose(names, Wanted()))
    assert "adapters/clustering/optimizer.pt" not in choose(names, Wanted())


def test_a_tokenizer_and_an_adapter_bring_no_model() -> None:
    names = [*SMALL, "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
    assert "model.safetensors" not in choose(names, Wanted("tokenizer"))
    found = choose(names, Wanted("adapter"))
    assert "adapter_model.safetensors" in found and "model.safetensors" not in found


@pytest.mark.parametrize(
    ("selector", "file"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("latest", "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
    ],
)
def test_gguf_by_quantization(selector: str, file: str) -> None:
    assert gguf_files(GGUF, selector) == [file]
    assert choose([*GGUF, "README.md"], Wanted(), selector) == [file]


def test_gguf_of_several_parts_and_in_folders() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    assert gguf_files([*parts, "Q8_0/m-Q8_0.gguf"], "Q4_K_M") == parts


def test_no_such_weights() -> None:
    with pytest.raises(CheckpointError, match=r"no GGUF file matches 'Q4_K'; there are: m-IQ4"):
        gguf_files(GGUF, "Q4_K")
    with pytest.raises(CheckpointError, match=r"--load-format auto reads .* only: json, onnx"):
        choose(["config.json", "model.onnx"], Wanted())
    with pytest.raises(CheckpointError, match=r"LoRA adapter .* --lora-paths"):
        choose(["adapter_config.json", "adapter_model.safetensors"], Wanted())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("org/model", ("hf", "org/model")),
        ("org/model@v1:Q4_K_M", ("hf", "org/model@v1:Q4_K_M")),
        ("hf://gpt2", ("hf", "gpt2")),
        ("modelscope://org/model", ("modelscope", "org/model")),
        ("https://huggingface.co/org/model", ("hf", "org/model")),
        ("https://huggingface.co/org/model/tree/v1?x=1", ("hf", "org/model@v1")),
        ("https://hf.co/org/m/blob/main/m-Q8_0.gguf", ("hf", "org/m@main:m-Q8_0.gguf")),
        ("radix-tiny", None),
        ("/models/a", None),
        ("./models/a", None),
        ("models/a/", None),
        ("models/a.gguf", None),
        ("a/b/c", None),
    ],
)
def test_names(name: str, found: tuple[str, str] | None) -> None:
    assert scheme_of(name) == found


def test_the_parts_of_a_name() -> None:
    repo = split_repo("org/model@v1:Q4_K_M", "main")
    assert (repo.name, repo.revision, repo.selector) == ("org/model", "v1", "Q4_K_M")
    assert split_repo("org/model", "v2").revision == "v2"


def test_an_unknown_scheme_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--model-path gs://b/m: nothing.*; these work: .*s3://"):
        locate_model("gs://b/m")
    with pytest.raises(ConfigError, match=r"--tokenizer-path az://b/m: nothing is read from az://"):
        locate_model("az://b/m", Wanted("tokenizer", "--tokenizer-path"))
