"""Video models through a whole engine, against Hugging Face's generate."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.offline import Engine
from radixlm.multimodal.checkpoint import class_of
from radixlm.multimodal.video import MAX_FRAMES, read_video

transformers = pytest.importorskip("transformers")

from PIL import Image  # noqa: E402

from tests.multimodal.test_families import IMAGES, encoded  # noqa: E402
from tests.multimodal.tiny import FAMILIES, SQUARE, Tiny, save  # noqa: E402
from tests.multimodal.tiny_later import LATER  # noqa: E402
from tests.multimodal.tiny_more import MORE, NEEDS  # noqa: E402
from tests.multimodal.tiny_newer import NEWER  # noqa: E402

NUM_NEW = 10
FPS = 2.0


def video(seed: int, count: int, width: int, height: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 255, (count, height, width, 3), np.uint8)


VIDEOS = (video(1, 4, 40, 28), video(2, 6, 28, 56))


def qwen(kind: str, step: int = 2) -> Any:
    size = {"shortest_edge": 28 * 28, "longest_edge": 6 * 112 * 112}
    return class_of(f"{kind}VideoProcessor")(
        patch_size=7, merge_size=2, temporal_patch_size=step, size=size
    )


def reader(kind: str, **options: Any) -> Any:
    return class_of(f"{kind}VideoProcessor")(**options)


def onevision() -> Any:
    return class_of("LlavaOnevisionVideoProcessor")(size=SQUARE)


SMOL = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
SCALED = {"scale_resolution": 56, "patch_size": 14}
QWEN = "<|vision_start|><|video_pad|><|vision_end|>"
GLM = "<|begin_of_video|><|video|><|end_of_video|>"
# family: its video processor, and the placeholder of a video
WATCHING: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen2_vl": (lambda: qwen("Qwen2VL"), "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen2_5_vl": (lambda: qwen("Qwen2VL"), "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen3_vl": (lambda: qwen("Qwen3VL"), "<|vision_start|><|video_pad|><|vision_end|>"),
    "glm4v": (lambda: qwen("Glm4v"), "<|begin_of_video|><|video|><|end_of_video|>"),
    "llava_onevision": (onevision, "<video>"),
    "qwen3_5": (lambda: qwen("Qwen3VL"), QWEN),
    "qwen3_5_moe": (lambda: qwen("Qwen3VL"), QWEN),
    "qwen4": (lambda: qwen("Qwen3VL"), QWEN),
    "lfm3_vl": (lambda: qwen("Qwen2VL"), QWEN),
    "cosmos3_edge": (lambda: qwen("Cosmos3Edge", 1), QWEN),
    "dots3_note": (lambda: qwen("Qwen2VL", 1), "<|video_pad|>"),
    "hyperclovax_vision_v2": (lambda: qwen("Qwen2VL"), "<vision><|video_pad|></vision>"),
    "exaone4_5": (lambda: qwen("Qwen2VL"), "<vision><|video_pad|></vision>"),
    "glm_ocr": (lambda: qwen("Glm46V"), GLM),
    "glm46v": (lambda: qwen("Glm46V"), GLM),
    "glm4v_moe": (lambda: qwen("Glm4v"), GLM),
    "video_llama3": (lambda: qwen("VideoLlama3", 1), "<video>"),
    "muse_glimmer": (lambda: reader("MuseGlimmer", patch_size=7), "<|video|>"),
    "muse_spark": (lambda: reader("MuseGlimmer", patch_size=7), "<|video|>"),
    "gemma4": (
        lambda: reader("Gemma4", patch_size=4, max_soft_tokens=70, pooling_kernel_size=3),
        "<|video|>",
    ),
    "internvl": (lambda: reader("InternVL", size=SQUARE), "<video>"),
    "smolvlm": (lambda: reader("SmolVLM", **SMOL), "<video>"),
    "minicpm_ocr": (lambda: reader("MiniCPMOcr", **SCALED), "<|video_pad|>"),
    "minicpmv4_6": (lambda: reader("MiniCPMV4_6", **SCALED), "<|video_pad|>"),
    "minicpmv4_7": (lambda: reader("MiniCPMV4_6", **SCALED), "<|video_pad|>"),
}
QUICK = ("qwen2_vl", "qwen3_vl", "qwen4", "muse_glimmer", "minicpmv4_7", "llava_onevision")


# Hugging Face supports no image next to a video, and no videos of different lengths together
CASES = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), (([0], False), ([1, 0], False))),
    "llava_onevision": (([0], False), ([1, 1], False), ([1], True)),
    "internvl": (([0], False), ([1, 1], False), ([1], True)),
    "smolvlm": (([0], False), ([1, 0], False)),
}
RECURRENT = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe", "qwen4")


def metadata(frames: np.ndarray[Any, Any]) -> dict[str, Any]:
    count = len(frames)
    return {
        "total_num_frames": count, "fps": FPS, "duration": count / FPS,
        "frames_indices": list(range(count)),
    }  # fmt: skip


def expected(tiny: Tiny, model: Any, text: str, videos: list[Any], more: dict[str, Any]) -> Any:
    given = tiny.processor(
        text=[text], videos=videos, video_metadata=[metadata(f) for f in videos],
        do_sample_frames=False, return_tensors="pt", return_metadata=True, **more,
    )  # fmt: skip
    given.pop("video_metadata", None)
    given.pop("second_per_grid_ts", None) if tiny.config.model_type == "qwen2_vl" else None
    with torch.no_grad():
        made = model.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)
    num_prompt = given["input_ids"].shape[1]
    return num_prompt, made[0, num_prompt:].tolist()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in WATCHING],
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_family_equals_hugging_face(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    tiny = {**FAMILIES, **MORE, **LATER, **NEWER}[name]()
    make, stand = WATCHING[name]
    whole = tiny.processor
    whole.video_processor = make()
    tiny.config.video_token_id = whole.tokenizer.convert_tokens_to_ids(whole.video_token)
    model = save(tiny, tmp_path)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    try:
        for chosen, has_image in CASES.get(name, (([0], False), ([1, 0], False), ([1], True))):
            text = "watch " + " and ".join(stand for _ in chosen) + " now tell"
            videos, more, sent = [VIDEOS[i] for i in chosen], {}, {}
            if has_image:
                text += f" {tiny.placeholder} beside"
                more["images"], sent["image_data"] = [IMAGES[1]], [encoded(IMAGES[1])]
            num_prompt, want = expected(tiny, model, text, videos, more)
            for turn in range(2):
                got = engine.generate(
                    text,
                    {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    video_data=[[encoded(Image.fromarray(f)) for f in one] for one in videos],
                    return_logprob=True,
                    **sent,
                )
                meta = got["meta_info"]
                found = [token for _, token, *_ in meta["output_token_logprobs"]]
                assert meta["prompt_tokens"] == num_prompt
                assert (chosen, turn, found) == (chosen, turn, want)
                if turn:
                    # recurrent states are saved at the end of a chunk
                    step = 48 if name in RECURRENT else 16
                    assert meta["cached_tokens"] >= (num_prompt - 1) // step * step
    finally:
        engine.shutdown()


def test_a_file_gives_its_frames() -> None:
    av = pytest.importorskip("av")
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for shade in range(30):
            frame = np.full((16, 32, 3), shade * 8, np.uint8)
            packets = stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24"))
            container.mux(packets)
        container.mux(stream.encode())
    made = read_video(data.getvalue(), 2.0, "here")
    assert made.frames.shape == (6, 16, 32, 3) and made.fps == 2.0
    means = made.frames.reshape(6, -1).mean(1)
    assert np.abs(means - np.arange(0, 30, 5) * 8).max() < 12
    assert len(means) < MAX_FRAMES
    fewer = read_video(data.getvalue(), 2.0, "here", 3)
    assert fewer.frames.shape[0] == 3 and fewer.fps == 1.0
    with pytest.raises(InvalidRequest, match=r"^here"):
        read_video(data.getvalue()[:100], 2.0, "here")
