"""MiDashengLM with its published names through the engine, against plain torch code and Qwen 2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

tf = pytest.importorskip("transformers")

from radixlm.base.errors import CheckpointError, InvalidRequest  # noqa: E402
from radixlm.entrypoints.offline import Engine  # noqa: E402
from radixlm.models.encoders.transformers_encoder import TransformersEncoder  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_audio_models import AUDIOS, NUM_NEW, audio, wav  # noqa: E402
from tests.multimodal.test_custom_encoders import greedy, written  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import TEXT, text, tokenizer  # noqa: E402

WIDTH, HEADS, DEPTH, BANDS, STRETCH, MERGE = 32, 2, 2, 16, 10, 5
ENCODER = {
    "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "mlp_ratio": 1.5, "n_mels": BANDS,
    "patch_size": [BANDS, 4], "patch_stride": [BANDS, 4], "target_length": 4 * STRETCH,
    "input_channels": 1, "init_values": 0.1, "qkv_bias": True, "outputdim": 9,
}  # fmt: skip
NAMES = "<|audio_bos|> <|AUDIO|> <|audio_eos|>"
PROMPT = "hear <|audio_bos|><|AUDIO|><|audio_eos|>"


def encoder_tensors() -> dict[str, Tensor]:
    at, inner = "audio_encoder.", int(WIDTH * 1.5)
    shapes: dict[str, tuple[int, ...]] = {
        at + "patch_embed.proj.weight": (WIDTH, 1, BANDS, 4),
        at + "patch_embed.proj.bias": (WIDTH,),
        at + "time_pos_embed": (1, WIDTH, 1, STRETCH), at + "freq_pos_embed": (1, WIDTH, 1, 1),
        "audio_projector.net.0.weight": (64, MERGE * WIDTH),
        "audio_projector.net.2.weight": (64, 64),
    }  # fmt: skip
    shapes |= {f"{at}init_bn.{n}": (BANDS,) for n in ("weight", "bias", "running_mean")}
    for kind in ("weight", "bias"):
        shapes[f"{at}norm.{kind}"] = (WIDTH,)
        for i in range(DEPTH):
            own = f"{at}blocks.{i}."
            rows = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
            rows |= {"mlp.fc1": (inner, WIDTH), "mlp.fc2": (WIDTH, inner)}
            for name, shape in rows.items():
                shapes[f"{own}{name}.{kind}"] = shape if kind == "weight" else shape[:1]
            shapes |= {f"{own}norm{n}.{kind}": (WIDTH,) for n in (1, 2)}
    shapes |= {f"{at}blocks.{i}.ls{n}.gamma": (WIDTH,) for i in range(DEPTH) for n in (1, 2)}
    made = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    made[at + "init_bn.running_var"] = torch.rand(BANDS) * 900 + 100
    made[at + "front_end.0.mel_scale.fb"] = torch.zeros(257, BANDS)
    return made


class Reference:
    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = w

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def normed(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-6)

    def bands(self, samples: Tensor) -> Tensor:
        """[bands, frames] in decibels."""
        seen = torch.stft(samples, 512, 160, 512, torch.hann_window(512), return_complex=True)
        top = 2595 * math.log10(1 + 8000 / 700)
        edges = [700 * (10 ** (top * i / (BANDS + 1) / 2595) - 1) for i in range(BANDS + 2)]
        filters = torch.zeros(BANDS, 257)
        for b in range(BANDS):
            low, middle, high = edges[b : b + 3]
            for n in range(257):
                at = 8000 * n / 256
                rise, fall = (at - low) / (middle - low), (high - at) / (high - middle)
                filters[b, n] = max(0.0, min(rise, fall))
        made = 10 * (filters @ seen.abs() ** 2).clamp(min=1e-10).log10()
        return made.clamp(min=made.max().item() - 120)

    def attend(self, at: str, x: Tensor, heard: Tensor) -> Tensor:
        q, k, v = self.linear(at + "qkv", x).chunk(3, -1)
        read = []
        for head in range(HEADS):
            own = slice(16 * head, 16 * head + 16)
            scores = q[:, own] @ k[:, own].T / 4 - 1e4 * (1 - heard)
            read.append(scores.softmax(-1) @ v[:, own])
        return self.linear(at + "proj", torch.cat(read, -1))

    def rows(self, samples: np.ndarray[Any, Any]) -> Tensor:
        at, w = "audio_encoder.", self.w
        bands = self.bands(torch.tensor(samples / 32768, dtype=torch.float32))
        bn = {k: w[f"{at}init_bn.{k}"][:, None] for k in ("running_mean", "weight", "bias")}
        spread = (w[at + "init_bn.running_var"][:, None] + 1e-5).sqrt()
        bands = (bands - bn["running_mean"]) / spread * bn["weight"] + bn["bias"]
        count = bands.shape[1] // 4
        kernel = w[at + "patch_embed.proj.weight"].reshape(WIDTH, -1)
        cut = bands[:, : 4 * count].reshape(BANDS, count, 4).permute(1, 0, 2).reshape(count, -1)
        x = cut @ kernel.T + w[at + "patch_embed.proj.bias"] + w[at + "freq_pos_embed"].flatten()
        heard, made = (torch.arange(count) < len(samples) // 640).float(), []
        for first in range(0, count, STRETCH):
            part, own = x[first : first + STRETCH], heard[first : first + STRETCH]
            part = part + w[at + "time_pos_embed"][0, :, 0, : len(part)].T
            for i in range(DEPTH):
                b = f"{at}blocks.{i}."
                mixed = self.attend(b + "attn.", self.normed(b + "norm1", part), own)
                part = part + mixed * w[b + "ls1.gamma"]
                h = F.gelu(self.linear(b + "mlp.fc1", self.normed(b + "norm2", part)))
                part = part + self.linear(b + "mlp.fc2", h) * w[b + "ls2.gamma"]
            made.append(self.normed(at + "norm", part))
        seen = torch.cat(made)[: count // MERGE * MERGE].reshape(-1, MERGE * WIDTH)
        return self.linear(
            "audio_projector.net.2", F.gelu(self.linear("audio_projector.net.0", seen))
        )


def midasheng(folder: Path, **changes: Any) -> tuple[Any, Reference]:
    """A checkpoint; its text model, and the encoder."""
    tok = tokenizer(*NAMES.split())
    tok.save_pretrained(folder)
    torch.manual_seed(0)
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT, tie_word_embeddings=False)).float().eval()
    randomise(model)
    seen = encoder_tensors()
    written(folder, saved(model, folder / "text", "decoder.") | seen, {
        "architectures": ["MiDashengLMModel"], "model_type": "midashenglm",
        "audio_encoder_config": ENCODER | changes, "subsample_factor": MERGE,
        "audio_token_id": tok.convert_tokens_to_ids("<|AUDIO|>"),
        "text_config": {
            **text("qwen2_5_omni_text"), "tie_word_embeddings": False,
            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
        },
    })  # fmt: skip
    return model, Reference(seen)


@pytest.mark.filterwarnings("ignore")
def test_midasheng(tmp_path: Path) -> None:
    model, encoder = midasheng(tmp_path)
    reader = load_processor(tmp_path)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    try:
        for chosen in ([0], [1, 2]):
            clips = [AUDIOS[i] for i in chosen]
            prompt = " and ".join(PROMPT for _ in chosen) + " what is it?"
            rows = [encoder.rows(clip) for clip in clips]
            whole = prompt
            for one in rows:
                whole = whole.replace("<|AUDIO|>", "<|audio|>" * len(one), 1)
            whole = whole.replace("<|audio|>", "<|AUDIO|>")
            ids = reader.tokenizer(whole)["input_ids"]
            places = [i for i, one in enumerate(ids) if one == reader.audio_token_id]
            want, first = greedy(model, ids, places, torch.cat(rows))
            for turn in range(2):
                meta = engine.generate(
                    prompt, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    audio_data=[wav(clip) for clip in clips], return_logprob=True,
                )["meta_info"]  # fmt: skip
                assert meta["prompt_tokens"] == len(ids)
                assert math.isclose(meta["output_token_logprobs"][0][0], first, abs_tol=1e-3)
                assert [one[1] for one in meta["output_token_logprobs"]] == want
                assert not turn or meta["cached_tokens"] >= (len(ids) - 1) // 16 * 16
        with pytest.raises(InvalidRequest, match="2080 samples is too short"):
            engine.generate(PROMPT, {"max_new_tokens": 1}, audio_data=wav(audio(4, 0.13)))
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("key", "value"), [("patch_size", [8, 4]), ("input_channels", 2), ("center", False)]
)
@pytest.mark.filterwarnings("ignore")
def test_other_encoders_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    midasheng(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match="audio_encoder_config"):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)
