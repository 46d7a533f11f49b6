"""The tokenizer that SGLang's tests compare with: transformers', of the served model."""

from typing import Any

from transformers import AutoTokenizer

from radixlm.engine.model_info import find_model


def get_tokenizer(name: str, *_: Any, **__: Any) -> Any:
    """transformers' tokenizer of a folder or of a bundled model."""
    return AutoTokenizer.from_pretrained(str(find_model(name)))
