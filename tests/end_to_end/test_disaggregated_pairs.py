"""Prefill and decode servers with every other feature: a pair gives what one server gives, and the
pages of the prompts did come from the other server."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.end_to_end.test_disaggregation import Pair, _free_port, _prompt
from tests.fakes.tiny_checkpoint import cached_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
KV = ("--max-total-tokens", "8192", "--enable-metrics")
LORA = ("--lora-paths", *(f"{n}=zoo/models/radix-tiny-lora-{n}" for n in ("upper", "spanish")))
EAGLE3 = ("--speculative-algorithm", "EAGLE3")
NGRAM = ("--speculative-algorithm", "NGRAM")
TWO = ("--tp-size", "2")
GROUPS = (*TWO, "--dp-size", "2", "--enable-dp-attention")
Flags = tuple[str, ...]

# name: (model, flags of both, of the prefill server, of the decode server)
CASES: dict[str, tuple[str, Flags, Flags, Flags]] = {
    "adapters": ("", LORA, (), ()),
    "eagle3": ("", EAGLE3, (), ()),
    "eagle3 at decode": ("", (), (), EAGLE3),
    "draft model": ("", ("--speculative-algorithm", "STANDALONE"), (), ()),
    "ngram and adapters": ("", LORA, (), NGRAM),
    "ngram and several tokens a step": ("", (), (), (*NGRAM, "--num-continuous-decode-steps", "8")),
    "int8": ("", ("--kv-cache-dtype", "int8"), (), ()),
    "tp 2 to 1": ("", (), TWO, ()),
    "tp 1 to 2": ("", (), (), TWO),
    "tp 2 to 1 with eagle3": ("", EAGLE3, TWO, ()),
    "attention groups to 1": ("", (), GROUPS, ()),
    "1 to attention groups": ("", (), (), GROUPS),
    "pp 2 to 1": ("", (), ("--pp-size", "2"), ()),
    "windows": ("Gemma3ForCausalLM", (), (), ()),
    "latents": ("DeepseekV3ForCausalLM", (), (), ()),
    "states": ("Qwen3NextForCausalLM", (), (), ()),
    "images": ("radix-tiny-vl", (), (), ()),
    "sounds and videos": ("", ("--chunked-prefill-size", "48"), (), ()),
}
MEDIA = ("images", "sounds and videos")


@contextlib.contextmanager
def _pair(name: str, folder: str | None = None) -> Iterator[Pair]:
    model, both, first, second = CASES[name]
    folder = str(cached_tiny(model)) if model.endswith("LM") else model or folder
    port, mode = _free_port(), "--disaggregation-mode"
    place = ("--disaggregation-bootstrap-port", str(port))
    with contextlib.ExitStack() as stack:
        flags = (*KV, *both, *first, mode, "prefill", *place)
        prefill = stack.enter_context(RunningServer(*flags, model=folder))
        flags = (*KV, *both, *second, mode, "decode")
        decode = stack.enter_context(RunningServer(*flags, model=folder))
        made = Pair(prefill, decode, port)
        yield made
        made.pool.shutdown(wait=False, cancel_futures=True)
        for server in (prefill, decode):
            assert "Traceback" not in "".join(server.log)


def _bodies(name: str) -> list[dict[str, Any]]:
    made = []
    for seed in range(12):
        rng = random.Random(seed)
        sampling = {
            "temperature": rng.choice([0, 0.8]),
            "max_new_tokens": rng.choice([1, 7, 24]),
            "sampling_seed": seed,
            "n": rng.choice([1, 1, 2]),
            "ignore_eos": True,
        }
        body: dict[str, Any] = {"sampling_params": sampling, "return_logprob": seed % 3 == 0}
        if CASES[name][0].endswith("LM"):
            body["input_ids"] = [rng.randrange(3, 250) for _ in range(rng.choice([20, 77, 160]))]
        else:
            body["text"] = _prompt(seed % 5, rng.choice([9, 60, 200]))
        if "adapters" in name:
            body["lora_path"] = (None, "upper", "spanish")[seed % 3]
        elif name.startswith("eagle3") and seed % 2:
            sampling |= {"json_schema": '{"type": "object"}', "ignore_eos": False}
        made.append(body)
    return made


def _facts(answer: Any) -> list[Any]:
    answers = answer if isinstance(answer, list) else [answer]
    return [(a["output_ids"], a["meta_info"].get("output_token_logprobs")) for a in answers]


@pytest.mark.parametrize("name", [name for name in CASES if name not in MEDIA])
def test_a_pair_gives_what_one_server_gives(name: str) -> None:
    bodies = _bodies(name)
    with _pair(name) as pair:
        got = [_facts(pair.post(**body)[1]) for body in bodies]
        want = [_facts(pair.prefill.post("/generate", **body).json()) for body in bodies]
        assert got == want
        assert pair.metric("radixlm:kv_pulls_whole", 4) >= 4


def test_images_go_through_a_pair() -> None:
    images = pytest.importorskip("tests.end_to_end.test_images")
    with _pair("images") as pair:
        for colour in ("red", "blue"):
            messages = [images.turn(images.url(colour), "What colour is the shape? " * 8)]
            body = {"messages": messages, "temperature": 0, "max_tokens": 12}
            _, second = pair.post("/v1/chat/completions", **body)
            whole = pair.prefill.post("/v1/chat/completions", **body).json()
            assert second["choices"] == whole["choices"]
        assert pair.metric("radixlm:kv_pulls_whole", 2) >= 2


@pytest.mark.filterwarnings("ignore")  # Hugging Face models of tiny configs
@pytest.mark.parametrize("kind", ["audio", "video"])
def test_sounds_and_videos_go_through_a_pair(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny = pytest.importorskip("tests.multimodal.tiny")
    sounds = pytest.importorskip("tests.end_to_end.test_media")
    videos = pytest.importorskip("tests.multimodal.test_video_models")
    made, media = (
        videos.FAMILIES["qwen2_vl"](),
        [[videos.encoded(videos.Image.fromarray(f)) for f in videos.VIDEOS[0]]],
    )
    make, place = videos.WATCHING["qwen2_vl"]
    if kind == "audio":
        made = sounds.qwen2_audio()
        media, place = [sounds.audio(1)["input_audio"]["data"]], made.placeholder
    else:
        made.processor.video_processor = make()
    tiny.save(made, tmp_path)
    with _pair("sounds and videos", str(tmp_path)) as pair:
        for count in (1, 2):
            body = {
                "text": f"{place} what is it? " * count,
                f"{kind}_data": media * count,
                "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            }
            _, second = pair.post(**body)
            whole = pair.prefill.post("/generate", **body).json()
            assert second["output_ids"] == whole["output_ids"]
        assert pair.metric("radixlm:kv_pulls_whole", 2) >= 2
