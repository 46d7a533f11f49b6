"""Pixtral and Mistral Small in Mistral's own format, against the classes of transformers."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from radixlm.arch.families.mistral_native import config_of  # noqa: E402
from radixlm.arch.media.layouts.pixtral import LAYOUT  # noqa: E402
from radixlm.text.tekken import tekken_files  # noqa: E402
from tests.engine.test_mistral_native import KEYS, NAMES, in_turn, write  # noqa: E402
from tests.multimodal.compare_answers import assert_same_answers  # noqa: E402
from tests.multimodal.tiny import Tiny, save  # noqa: E402
from tests.multimodal.tiny_more import mistral3, pixtral  # noqa: E402

IMAGE_TOKEN, HEAD_DIM = 10, 16
SPECIAL = [f"<{i}>" for i in range(20)]
for _place, _text in ((10, "[IMG]"), (12, "[IMG_BREAK]"), (13, "[IMG_END]")):
    SPECIAL[_place] = _text
TEKKEN = {
    "config": {"pattern": r"\S+|\s+", "default_num_special_tokens": 20},
    "special_tokens": [{"rank": i, "token_str": one} for i, one in enumerate(SPECIAL)],
    "vocab": [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)
    ],
}
OF_MEDIA = (
    (r"model\.language_model\.", "model."),
    (r"model\.vision_tower\.", "vision_encoder."),
    (r"model\.multi_modal_projector\.linear_1", "vision_language_adapter.w_in"),
    (r"model\.multi_modal_projector\.linear_2", "vision_language_adapter.w_out"),
    (r"model\.multi_modal_projector\.norm", "pre_mm_projector_norm"),
    (r"model\.multi_modal_projector\.patch_merger", "patch_merger"),
    (r"(vision.*attention\.)([qkvo])_proj", r"\1w\2"),
)


def native_name(name: str) -> str:
    for old, new in (*OF_MEDIA, *NAMES):
        name = re.sub(old, new, name)
    return name


def native(tiny: Tiny, model: Any, folder: Path) -> Path:
    """The same weights in Mistral's format. Its encoder has 16 channels a head too."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if re.search(r"[qk]_proj", name):
            tensor = in_turn(tensor, HEAD_DIM)
        tensors[native_name(name)] = tensor.clone().contiguous()
    config = model.config.text_config.to_dict()
    vision = model.config.vision_config
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    encoder = {key: getattr(vision, key) for key in keys}
    encoder |= {"image_size": 112, "patch_size": 7, "rope_theta": 1e4, "num_channels": 3}
    encoder |= {"image_token_id": IMAGE_TOKEN, "adapter_bias": True}
    encoder["max_image_size"] = tiny.processor.image_processor.size["longest_edge"]
    if model.config.model_type == "mistral3":
        encoder |= {"mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
        encoder |= {"spatial_merge_size": 2, "adapter_bias": False}
    theta = config["rope_parameters"]["rope_theta"]
    params = {old: config.get(new) for old, new in KEYS.items()}
    params |= {"rope_theta": theta, "sliding_window": config["sliding_window"]}
    folder = write(folder, {**params, "vision_encoder": encoder}, tensors)
    (folder / "tekken.json").write_text(json.dumps(TEKKEN))
    return folder


def with_tekken(tiny: Tiny, folder: Path) -> Tiny:
    """With the tokenizer that TEKKEN describes."""
    folder.mkdir()
    for name, value in tekken_files(TEKKEN, "tekken.json").items():
        (folder / name).write_text(json.dumps(value))
    read = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    tiny.processor.tokenizer = read
    tiny.processor.image_token_id = tiny.processor.image_ids = IMAGE_TOKEN
    tiny.config.image_token_id = IMAGE_TOKEN
    tiny.config.text_config.rms_norm_eps = 1e-5  # as of the norm before the merger
    return replace(tiny)


@pytest.mark.parametrize("make", [pixtral, mistral3])
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_native_folders_equal_their_classes(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = with_tekken(make(), tmp_path / "tokenizer")
    model = save(tiny, tmp_path / "theirs")
    assert_same_answers(tiny, model, native(tiny, model, tmp_path / "native"))


def test_a_norm_without_a_merger_is_refused() -> None:
    vision = {"hidden_size": 32, "add_pre_mm_projector_layer_norm": True}
    raw = config_of({"dim": 64, "vision_encoder": vision}, "params.json")
    with pytest.raises(ValueError, match="mm_projector_id"):
        LAYOUT.config(raw)
