"""Audio checkpoints with their published names, against the class with the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.entrypoints.offline import Engine

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from tests.multimodal.test_audio_models import AUDIOS, NUM_NEW, wav
from tests.multimodal.tiny import save
from tests.multimodal.tiny_audio import AUDIO, inputs_of


def _asr(folder: Path) -> None:
    """Qwen3-ASR as published: all parts inside a "thinker", the projector inside the encoder."""
    tensors = load_file(folder / "model.safetensors")
    named = {}
    for name, tensor in tensors.items():
        new = name.replace("model.multi_modal_projector.linear_", "model.audio_tower.proj")
        new = new.replace("model.language_model.", "thinker.model.", 1)
        new = new.replace("model.audio_tower.", "thinker.audio_tower.")
        named[new] = tensor
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: raw.pop(key) for key in ("architectures", "model_type")}
    raw["text_config"] |= {"tie_word_embeddings": True}
    raw["audio_config"] |= {"model_type": "qwen3_asr_audio_encoder"}
    wrapped = {**kept, "thinker_config": {**raw, "model_type": "qwen3_asr_thinker"}}
    (folder / "config.json").write_text(json.dumps(wrapped))


def _speaking(folder: Path) -> None:
    """Qwen3-Omni with the weights of its speech output."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("talker.model.layers.0.mlp.gate.weight", "talker.codec_head.weight"):
        tensors[name] = torch.zeros(3, 5)
    tensors["code2wav.decoder.0.conv.weight"] = torch.zeros(3, 5, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"talker_config": {"num_hidden_layers": 7}, "code2wav_config": {"hidden_size": 3}}
    (folder / "config.json").write_text(json.dumps(raw | {"enable_audio_output": True}))


def _adapted(folder: Path, model: Any) -> None:
    """Granite Speech with its adapter next to the weights; the model is changed accordingly."""
    made, parts = torch.Generator().manual_seed(5), {}
    for layer, block in enumerate(model.model.language_model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(block.self_attn, name).weight
            down = torch.randn(4, weight.shape[1], generator=made) * 0.2
            up = torch.randn(weight.shape[0], 4, generator=made) * 0.2
            at = f"base_model.model.language_model.model.layers.{layer}.self_attn.{name}"
            parts |= {f"{at}.lora_A.weight": down, f"{at}.lora_B.weight": up}
            with torch.no_grad():
                weight += 2.0 * (up @ down)
    save_file(parts, folder / "adapter_model.safetensors")
    held = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(held))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"has_lora_adapter": True}))


def _whole(folder: Path) -> None:
    """Qwen2.5-Omni as published: its thinker inside the model that also speaks."""
    tensors = load_file(folder / "model.safetensors")
    named = {f"thinker.{name.removeprefix('thinker.')}": t for name, t in tensors.items()}
    named["talker.codec_head.weight"] = torch.zeros(3, 5)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("architectures")
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni"}
    whole |= {"thinker_config": raw, "talker_config": {"num_hidden_layers": 3}}
    (folder / "config.json").write_text(json.dumps(whole))


PUBLISHED = [
    ("qwen2_5_omni", lambda folder, model: _whole(folder)),
    ("qwen3_asr", lambda folder, model: _asr(folder)),
    ("qwen3_omni", lambda folder, model: _speaking(folder)),
    ("granite_speech", _adapted),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "publish"), PUBLISHED)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_published_names_answer_as_the_class_does(name: str, publish: Any, tmp_path: Path) -> None:
    tiny = AUDIO[name]()
    model = save(tiny, tmp_path)
    model = tiny.processor.model = getattr(model, "thinker", model)
    publish(tmp_path, model)
    text = f"hear {tiny.placeholder} and tell"
    inputs = inputs_of(tiny, text, [AUDIOS[1].astype(np.float32) / 32768])
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096
    )
    try:
        got = engine.generate(
            text, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
            audio_data=[wav(AUDIOS[1])], return_logprob=True,
        )["meta_info"]  # fmt: skip
        found = [token for _, token, *_ in got["output_token_logprobs"]]
        assert found == made[0, inputs["input_ids"].shape[1] :].tolist()
    finally:
        engine.shutdown()
