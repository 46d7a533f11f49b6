"""adapter_config.json of PEFT (peft/tuners/lora/config.py). What changes the result and cannot be
applied exactly is refused by name; nothing of it is ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from radixlm.arch.json_file import read_object
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

T = TypeVar("T")
CONFIG_FILE = "adapter_config.json"
MAX_RANK = 4096  # a larger one is no adapter but a damaged config

_WHOLE_NAME = r"(.*\.)?(%s)$"  # of a module, by a pattern: peft/utils/other.py: get_pattern_key

# key -> what works instead; any other value than null, false, "", [] and {} is refused
_REFUSED = {
    "layer_replication": "adapters for the layers that the model has (null)",
    "use_qalora": "plain LoRA (use_qalora false)",
    "use_bdlora": "plain LoRA (use_bdlora null)",
    "arrow_config": "plain LoRA (arrow_config null)",
    "monteclora_config": "plain LoRA (monteclora_config null)",
    "megatron_config": "adapters of Hugging Face modules (megatron_config null)",
}
# what the tensors say themselves, what concerns training alone, and where files came from
_WITHOUT_EFFECT = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "fan_in_fan_out", "init_lora_weights", "lora_bias", "loftq_config"),
    *("eva_config", "velora_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying", "architectures", "model_type"),
    *("bias", "auto_map", "enable_lora", "merge_weights", "save_embedding_layers", "peft_version"),
    *("alora_invocation_tokens", "modules_to_save", "trainable_token_indices", "target_parameters"),
}
# initialisations that leave the base model's weights as they are
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


class LoraConfig(Record):
    """The part of the config that inference needs. Ranks and alphas by pattern are in the order of
    the file: the first that matches a module's name counts, as in PEFT."""

    rank: int
    alpha: float
    is_rank_stabilized: bool  # scale alpha / sqrt(rank), arXiv:2312.03732
    ranks: tuple[tuple[str, int], ...]
    alphas: tuple[tuple[str, float], ...]
    is_dora: bool  # arXiv:2402.09353
    has_biases: bool  # the layers' own biases were trained too
    invocation: tuple[int, ...]  # token ids that switch the adapter on (arXiv:2504.12397); () none
    saved: tuple[str, ...]  # modules whose weights are in the adapter whole
    tokens: tuple[tuple[str, tuple[int, ...]], ...]  # trained rows of token tables, by module
    base_model: str
    parameters: tuple[str, ...] = ()  # that hold all experts of a layer

    def rank_of(self, module: str) -> int:
        """The rank of a module by its name in the base model."""
        return _first_match(self.ranks, module, self.rank)

    def saves(self, module: str) -> bool:
        """Whether the module's own weight is replaced."""
        return any(_is_named(module, name) for name in self.saved)

    def wraps(self, parameter: str) -> bool:
        """Whether a parameter of a module is targeted."""
        return any(_is_named(parameter, name) for name in self.parameters)

    def unsaved(self, modules: Iterable[str]) -> list[str]:
        """The names of modules_to_save that none of these modules has."""
        known = list(modules)
        return [name for name in self.saved if not any(_is_named(one, name) for one in known)]

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Which rows of a module's table are replaced."""
        return next((ids for name, ids in self.tokens if not name or _is_named(module, name)), ())

    def scale_of(self, module: str) -> float:
        """What ``B A x`` is multiplied by."""
        rank, alpha = self.rank_of(module), _first_match(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """The config of the adapter in ``folder``. CheckpointError for one that is no LoRA adapter, or
    that asks for what is not supported."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG_FILE}; give the folder of a PEFT adapter, or its name on a hub"
        )
    config = read_object(file)
    try:
        _refuse_unsupported(config)
        return LoraConfig(
            rank=_rank("r", config.get("r", 8)),
            alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
            is_rank_stabilized=bool(config.get("use_rslora")),
            ranks=tuple((k, _rank(f"rank_pattern[{k!r}]", v)) for k, v in _pattern(config, "rank")),
            alphas=tuple(
                (k, _number(f"alpha_pattern[{k!r}]", v)) for k, v in _pattern(config, "alpha")
            ),
            is_dora=bool(config.get("use_dora")),
            has_biases=config.get("bias") in ("lora_only", "all"),
            invocation=_invocation(config),
            saved=tuple(_texts(config, "modules_to_save")),
            tokens=_trained_tokens(config),
            base_model=str(config.get("base_model_name_or_path") or ""),
            parameters=tuple(_texts(config, "target_parameters")),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"peft_type is {kind!r:.40}; only 'LORA' is supported")
    for key, works in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"{key} = {config[key]!r:.80} is not supported; what works: {works}")
    bias = config.get("bias", "none")
    if bias not in ("none", "lora_only", "all", None):
        raise ValueError(f"bias = {bias!r:.40} must be 'none', 'lora_only' or 'all'")
    if bias not in ("none", None) and config.get("use_dora"):
        raise ValueError(f"bias = {bias!r:.40} with use_dora is not supported; what works: 'none'")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights = {init!r:.40} changes the base model too; what works: the adapter "
            "saved as plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if value and key not in _WITHOUT_EFFECT and key not in _REFUSED:
            raise ValueError(f"{key} = {value!r:.80} is not known here; what works: null")


def _invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    """alora_invocation_tokens. ValueError for what else would have to wait for them."""
    ids = config.get("alora_invocation_tokens") or []
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ValueError(f"alora_invocation_tokens = {ids!r:.40} must be a list of token ids")
    for key in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if ids and config.get(key):
            raise ValueError(
                f"{key} with alora_invocation_tokens is not supported; use one of both"
            )
    if ids and config.get("bias", "none") not in ("none", None):
        raise ValueError("bias with alora_invocation_tokens is not supported; what works: 'none'")
    return tuple(ids)


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)


def _texts(config: Mapping[str, Any], key: str) -> list[str]:
    texts = config.get(key) or []
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"{key} = {texts!r:.40} must be a list of names")
    return texts


def _trained_tokens(config: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """trainable_token_indices: a list is of the token table, whose name is left out."""
    value = config.get("trainable_token_indices") or {}
    tables = value if isinstance(value, dict) else {"": value}
    for ids in tables.values():
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"trainable_token_indices = {ids!r:.40} must be a list of token ids")
    return tuple((str(name), tuple(ids)) for name, ids in tables.items())


def _pattern(config: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    pattern = config.get(f"{name}_pattern") or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{name}_pattern is no object of patterns and numbers")
    for key in pattern:
        try:
            re.compile(_WHOLE_NAME % key)
        except re.error as error:
            message = f"{name}_pattern: {key!r:.80} is no regular expression: {error}"
            raise ValueError(message) from error
    return list(pattern.items())


def _rank(key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{key} = {value!r:.40} must be a whole number from 1 to {MAX_RANK}")
    return value


def _number(key: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{key} = {value!r:.40} must be a number")
    return float(value)  # type: ignore[arg-type]


def _first_match(patterns: tuple[tuple[str, T], ...], module: str, default: T) -> T:
    matches = (value for key, value in patterns if re.match(_WHOLE_NAME % key, module))
    return next(matches, default)
