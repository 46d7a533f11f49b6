"""Further tiny checkpoints of language models behind towers; see ``tiny.py``."""

from __future__ import annotations

from collections.abc import Callable

import transformers as tf

from tests.multimodal.tiny import SQUARE, Tiny, pictures, text, tokenizer


def mllama() -> Tiny:
    tok = tokenizer("<|python_tag|>", bos_token="<|begin|>")
    tok.bos_token = "<|begin|>"
    tok.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tower = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 48, "image_size": 28, "patch_size": 7, "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 1], "vision_output_dim": 96,
    }  # fmt: skip
    config = tf.MllamaConfig(
        vision_config=tower, image_token_index=tok.convert_tokens_to_ids("<|image|>"),
        text_config=text(
            "mllama_text_model", num_hidden_layers=4, cross_attention_layers=[1, 3],
            vocab_size=tok.convert_tokens_to_ids("<|image|>"), pad_token_id=0, bos_token_id=257,
        ),
    )  # fmt: skip
    reader = pictures("Mllama", size=SQUARE, max_image_tiles=4)
    return Tiny(config, tf.MllamaProcessor(reader, tok), "<|image|>")


LATER: dict[str, Callable[[], Tiny]] = {made.__name__: made for made in (mllama,)}
