"""Tokenizers, processors and configurations, by transformers."""

from __future__ import annotations

from typing import Any

from radixlm.base.lazy import load


def get_tokenizer(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    """The tokenizer of a model's folder. ``tokenizer_mode="slow"``: not the one in Rust."""
    if kwargs.pop("tokenizer_mode", "auto") == "slow":
        kwargs["use_fast"] = False
    kwargs["revision"] = kwargs.pop("tokenizer_revision", None) or kwargs.get("revision") or "main"
    return load("transformers:AutoTokenizer").from_pretrained(tokenizer_name, *args, **kwargs)


def get_processor(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    """The processor of a multimodal model's folder."""
    kwargs.pop("tokenizer_mode", None)
    kwargs["revision"] = kwargs.pop("tokenizer_revision", None) or kwargs.get("revision") or "main"
    return load("transformers:AutoProcessor").from_pretrained(tokenizer_name, *args, **kwargs)


def get_config(
    model: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    model_override_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A model's configuration, with values of ``model_override_args``."""
    config = load("transformers:AutoConfig").from_pretrained(
        model, trust_remote_code=trust_remote_code, revision=revision or "main", **kwargs
    )
    config.update(model_override_args or {})
    return config
