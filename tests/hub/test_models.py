"""`radixlm pull` and `radixlm models`."""

import json
from pathlib import Path
from typing import Any

from radixlm.engine.model_info import ZOO
from radixlm.entrypoints.cli import main
from radixlm.hub.locate import Wanted, locate_model
from tests.fakes import gguf_file
from tests.fakes.hub import FakeHub, folder_files
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.hub.conftest import TINY


def listed(capsys: Any) -> dict[str, dict[str, Any]]:
    assert main(["models", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_pull_then_list_then_remove(hub: FakeHub, capsys: Any) -> None:
    assert main(["pull", "org/radix-tiny"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    row = listed(capsys)["org/radix-tiny"]
    assert row["path"] == str(folder) and row["architecture"] == "Qwen3ForCausalLM"
    assert row["num_bytes"] == sum(path.stat().st_size for path in TINY.iterdir())
    assert row["can_serve"] and row["dtype"] == "bfloat16" and row["quantization"] == ""
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "org/radix-tiny"
    assert main(["models", "rm", "org/radix-tiny"]) == 0
    assert not folder.exists()
    capsys.readouterr()
    assert not listed(capsys)


def test_pull_brings_a_new_commit_and_no_file_twice(hub: FakeHub, capsys: Any) -> None:
    main(["pull", "org/radix-tiny"])
    files = hub.repos["org/radix-tiny"].files("main")
    hub.add("org/radix-tiny", files | {"generation_config.json": b'{"temperature": 0.5}'})
    old = locate_model("org/radix-tiny")
    main(["pull", "org/radix-tiny"])
    new = locate_model("org/radix-tiny")
    assert new != old and b"0.5" in (new / "generation_config.json").read_bytes()
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"])


def test_include_and_exclude(hub: FakeHub, capsys: Any) -> None:
    main(["pull", "org/radix-tiny", "--include", "*.json", "--exclude", "tokenizer*"])
    folder = Path(capsys.readouterr().out.strip())
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json"}
    row = listed(capsys)["org/radix-tiny"]
    assert row["problem"] == "its tokenizer is missing"


def test_what_cannot_be_served_is_told(hub: FakeHub, capsys: Any) -> None:
    files = hub.repos["org/radix-tiny"].files("main")
    config = json.loads(files["config.json"])
    strange = config | {"architectures": ["StrangeForCausalLM"]}
    packed = config | {"quantization_config": {"quant_method": "exl3", "bits": 3}}
    hub.add("org/strange", files | {"config.json": json.dumps(strange).encode()})
    hub.add("org/packed", files | {"config.json": json.dumps(packed).encode()})
    main(["pull", "org/strange", "org/packed"])
    capsys.readouterr()
    rows = listed(capsys)
    assert "unknown architecture 'StrangeForCausalLM'" in rows["org/strange"]["problem"]
    assert rows["org/packed"]["quantization"] == "exl3 3 bit"
    assert "exl3 (tables of vectors) cannot be loaded" in rows["org/packed"]["problem"]


def test_names_that_are_wrong(hub: FakeHub, capsys: Any) -> None:
    main(["pull", "org/radix-tiny"])
    for argv in (["pull", "radix-tiny"], ["pull", "org/radix-tiyn"], ["models", "rm", "org/x"]):
        assert main(argv) == 2
    told = capsys.readouterr().err
    assert "give the name of a model on a hub" in told
    assert "did you mean 'org/radix-tiny'?" in told and "it is not here" in told


def test_gguf_files_and_adapters(hub: FakeHub, tmp_path: Path, capsys: Any) -> None:
    tiny = cached_tiny("Qwen3ForCausalLM")
    file = gguf_file.convert(tiny, tmp_path / "m-Q8_0.gguf", "qwen3", "Q8_0", {})
    hub.add("org/m-GGUF", {file.name: file.read_bytes()})
    hub.add("org/broken-GGUF", {"m.gguf": b"none"})
    hub.add("org/upper", folder_files(ZOO / "radix-tiny-lora-upper"))
    main(["pull", "org/m-GGUF:q8_0", "org/broken-GGUF"])
    locate_model("org/upper", Wanted("adapter"))
    capsys.readouterr()
    rows = listed(capsys)
    row = rows["org/m-GGUF:m-Q8_0.gguf"]
    assert (row["quantization"], row["architecture"]) == ("gguf Q8_0", "Qwen3ForCausalLM")
    assert row["can_serve"] and row["num_bytes"] == file.stat().st_size
    assert not rows["org/broken-GGUF:m.gguf"]["can_serve"]
    assert rows["org/upper"]["architecture"].startswith("LoRA of ")
    assert main(["models", "rm", "org/m-GGUF"]) == 0
    capsys.readouterr()
    assert len(listed(capsys)) == 2
