"""Reads Hugging Face config.json and generation_config.json without importing transformers.

Both forms of rotary parameters are read: ``rope_parameters`` (flat, or a dict for each layer type)
and the older ``rope_theta`` with ``rope_scaling``; see ``_rope``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixlm.arch.config import Config, is_number
from radixlm.arch.config_defaults import ALIASES, COMMON, defaults, model_types
from radixlm.arch.config_values import check_config_values
from radixlm.arch.draft import Draft
from radixlm.arch.json_file import read_object
from radixlm.arch.media.config_json import (
    BOUNDARY_TOKEN_KEYS,
    DEEPSTACK_KEYS,
    architecture_of,
    flattened,
)
from radixlm.arch.media.registry import encoder_names, text_model_type
from radixlm.arch.media.text_models import as_text_model
from radixlm.arch.registry import (
    ARCHITECTURES,
    BORROWED_CLASSES,
    EAGLE3_HEADS,
    convert_config,
    find,
    predicted,
)
from radixlm.arch.spec import Decoder
from radixlm.arch.validate import check
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import load
from radixlm.base.record import replace

_SPECULATORS = {  # by their kind
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2Speculator",
    "dspark": "DSparkSpeculator",
    "eagle3": "Eagle3Speculator",
    "mtp": "MtpSpeculator",
    "peagle": "PEagleSpeculator",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NESTED = ("text_config", "llm_config", "language_config")
# Keys of a multimodal checkpoint that its text model takes over unless it has them itself ...
_SHARED = (
    *("torch_dtype", "dtype", "quantization_config"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
    *(*BOUNDARY_TOKEN_KEYS, *DEEPSTACK_KEYS),
    *("num_nextn_predict_layers", "backbone_hidden_size", "use_ordered_embeddings"),
    *("num_centroids", "centroid_intermediate_top_k"),
)
# ... and keys that replace the text model's.
_OF_THE_WHOLE = ("tie_word_embeddings", "projection_dim", "id2label", "num_labels")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def load_config(folder: str | Path | Mapping[str, Any]) -> Config:
    """The config of a checkpoint folder, or of an already parsed config.json.

    Missing keys have the defaults of the Hugging Face class; the keys of a nested text config are
    at the top; ``rope_parameters`` is always there and complete. CheckpointError names the file and
    the key of a missing, truncated or invalid config, and an unknown architecture.
    """
    if isinstance(folder, Mapping):
        raw, source = dict(folder), "config.json"
    else:
        path = Path(folder) / "config.json"
        raw, source = read_object(path), str(path)
    with _named_errors(source):
        return _complete(raw, source)


def describe(checkpoint: str | Path | Mapping[str, Any] | Config) -> Decoder:
    """The description of a checkpoint folder, a parsed config.json or a loaded ``Config``."""
    c = checkpoint if isinstance(checkpoint, Config) else load_config(checkpoint)
    with _named_errors(c.source):
        decoder = find(c.architecture, c.source)(c)
        if beside := encoder_names(c.architecture):
            decoder = replace(decoder, names={**decoder.names, "beside": beside})
        return check(decoder, c.source)


@contextmanager
def _named_errors(source: str) -> Iterator[None]:
    """Turns errors about values that no check covers into CheckpointError with the file's name."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{source}: cannot be understood ({error})") from error


def describe_draft(checkpoint: str | Path | Mapping[str, Any] | Config) -> Draft | None:
    """The draft model that the checkpoint is, or the multi-token-prediction layers that it has
    beside the model; None where its config has neither."""
    c = checkpoint if isinstance(checkpoint, Config) else load_config(checkpoint)
    with _named_errors(c.source):
        found: Draft | None = load("radixlm.arch.families.drafts:draft_of")(c)
        if found is None:
            return None
        check(found.decoder, c.source)
    return found if found.modules else None


def load_generation_config(folder: str | Path) -> dict[str, Any]:
    """generation_config.json of the folder, {} where there is none."""
    path = Path(folder) / "generation_config.json"
    return read_object(path) if path.exists() else {}


def eos_token_ids(c: Config, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a text: those of generation_config.json and config.json together. The
    default of the model's class counts only where neither file has any."""
    eos: list[int] = []
    first = generation.get("eos_token_id")
    second = c.get("eos_token_id") if first is None or c.is_explicit("eos_token_id") else None
    for value in (first, second):
        ids = [] if value is None else value if isinstance(value, list) else [value]
        eos += [i for i in ids if isinstance(i, int) and i >= 0 and i not in eos]
    return tuple(eos)


def context_len(c: Config) -> int:
    """Tokens that the model was trained for. RoPE scaling multiplies max_position_embeddings
    unless the config has a smaller original length: then that product is in it already."""
    rope = c.rope_parameters
    max_len: int = c.max_position_embeddings
    original_len = rope.get("original_max_position_embeddings", max_len)
    # models with a rope for each layer type state the scaled length
    if rope.get("rope_type", "default") in ("default", "llama3") or original_len < max_len:
        return max_len
    return int(max_len * (rope.get("factor") or 1))


def _complete(raw: dict[str, Any], source: str) -> Config:
    raw = _of_heads(_of_speculators(flattened(raw), source))
    architecture, model_type = _identity(raw, source)
    nested = next((raw[key] for key in _NESTED if isinstance(raw.get(key), dict)), None)
    if nested is not None:
        outer = {key: raw[key] for key in _SHARED if key in raw}
        whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
        raw = {**outer, **nested, **whole}
        model_type = raw.get("model_type", model_type)
    find(architecture, source)
    raw = convert_config(model_type or model_types().get(architecture, ""), raw)
    model_type = text_model_type(architecture, raw) or model_type
    model_type, raw = as_text_model(model_type, raw)
    own = model_types().get(predicted(architecture), "")
    of_class = {**COMMON, **(defaults().get(model_type) or defaults().get(own, {}))}
    values = dict(raw)
    for name, others in ALIASES.items():
        spelled = [values[other] for other in (name, *others) if values.get(other) is not None]
        if spelled:
            values[name] = spelled[0]
    pattern = values.get("layers_block_type") or values.get("hybrid_override_pattern")
    if pattern and "num_hidden_layers" not in values:
        values["num_hidden_layers"] = len(pattern)
    if nested is None:
        for key in _REQUIRED:
            if key not in values and key not in of_class.get("absent", ()):
                raise CheckpointError(f"{source}: {key!r} is missing")
    explicit = frozenset(values)
    values = _typed({**of_class, **values}, of_class, source)
    values["architecture"], values["model_type"] = architecture, model_type or own
    _check(values, source)
    values["rope_parameters"] = _rope(raw, of_class, values, source)
    return Config(values, source, explicit)


def _of_speculators(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """A config of the ``speculators`` library with the keys of its layer at the top."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    if kind not in _SPECULATORS:
        raise CheckpointError(
            f"{source}: 'speculators_model_type' = {kind!r} is not supported (must be "
            f"one of {', '.join(map(repr, _SPECULATORS))})"
        )
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{source}: 'transformer_layer_config' must be an object")
    model_type = layer.get("model_type") or "llama"
    kept = {key: value for key, value in raw.items() if key != "model_type"}
    return {**layer, **kept, "architectures": [_SPECULATORS[kind]], "model_type": model_type}


def _of_heads(raw: dict[str, Any]) -> dict[str, Any]:
    """A config of Medusa heads by themselves, or of an MLP speculator, with all keys: that of
    Medusa's authors has no sizes."""
    names = raw.get("architectures") or ()
    ones = dict.fromkeys(
        ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers"), 1
    )
    if "MLPSpeculatorPreTrainedModel" in names or raw.get("model_type") == "mlp_speculator":
        own = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
        sizes = {"hidden_size": raw["emb_dim"]} if "emb_dim" in raw else {}
        return {**ones, **sizes, **raw, **own}
    is_medusa = "MedusaModel" in names or raw.get("model_type") == "medusa"
    if not is_medusa and (names or "medusa_num_heads" not in raw):
        return raw
    return {**ones, **raw, "architectures": ["MedusaModel"], "model_type": "medusa"}


def _identity(raw: Mapping[str, Any], source: str) -> tuple[str, str]:
    """(architecture, model_type); where one is missing, it follows from the other."""
    model_type = raw.get("model_type") or ""
    listed = raw.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise CheckpointError(f"{source}: 'architectures' must be a list of names")
    known = next((one for one in listed if one in ARCHITECTURES), None)
    if model_type in BORROWED_CLASSES:
        return BORROWED_CLASSES[model_type], model_type
    if known in EAGLE3_HEADS and "draft_vocab_size" in raw:
        return EAGLE3_HEADS[known], model_type
    if known:
        return architecture_of({**raw, "architectures": [known]}), model_type
    if listed:
        return listed[0], model_type
    if model_type in defaults():
        return str(defaults()[model_type]["architecture"]), model_type
    if architecture_of(raw):
        return architecture_of(raw), model_type
    raise CheckpointError(
        f"{source}: has no 'architectures', and model_type {model_type!r} is unknown"
    )


def _typed(values: dict[str, Any], of_class: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``values`` with the types of their defaults: null for false, 64.0 for 64, 1 for true."""
    for key, default in of_class.items():
        value = values[key]
        if isinstance(default, bool):
            if value not in (None, False, True):
                raise CheckpointError(f"{source}: {key!r} = {value!r} must be true or false")
            values[key] = bool(value)
        elif isinstance(default, int | float) and value is not None and key not in _LISTS_TOO:
            if not is_number(value) or isinstance(value, bool):
                raise CheckpointError(f"{source}: {key!r} = {value!r} must be a number")
            is_whole = isinstance(default, int) and value == int(value)
            values[key] = int(value) if is_whole else value
        elif isinstance(default, str) and value is not None and not isinstance(value, str):
            raise CheckpointError(f"{source}: {key!r} = {value!r} must be a string")
    return values


_LISTS_TOO = ("eos_token_id",)
_POSITIVE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "intermediate_size", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "sliding_window"),
    "kv_lora_rank",
)
_MAX = {"num_hidden_layers": 4096}  # a description has a record for each layer
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def _check(values: Mapping[str, Any], source: str) -> None:
    """CheckpointError for counts that are not positive integers and for other invalid numbers."""
    for key in _POSITIVE:
        value = values.get(key)
        if key == "intermediate_size" and isinstance(value, list) and value:
            value = min(value, key=lambda one: one if isinstance(one, int) else -1)  # by layer
        if value is None:
            continue
        is_count = isinstance(value, int) and not isinstance(value, bool)
        smallest = 0 if key in ("num_experts", "sliding_window", "num_experts_per_tok") else 1
        if key == "head_dim" and values.get("qk_rope_head_dim") == 0:
            smallest = 0  # latent attention without rotation sets this key to 0 too
        if not is_count or not smallest <= value <= _MAX.get(key, 2**31):
            raise CheckpointError(f"{source}: {key!r} = {value!r} must be a positive integer")
    for key in _NUMBERS:
        value = values.get(key)
        if value is not None and not (is_number(value) and value >= 0):
            raise CheckpointError(f"{source}: {key!r} = {value!r} must be a number >= 0")
    experts = values.get("num_experts")
    # with one expert some models have dense layers
    max_chosen = (experts or 0) + (values.get("zero_expert_num") or 0)
    if experts and experts > 1 and (values.get("num_experts_per_tok") or 0) > max_chosen:
        raise CheckpointError(f"{source}: 'num_experts_per_tok' exceeds 'num_experts'")
    check_config_values(values, source)
    kinds = values.get("layer_types")
    if kinds is not None and len(kinds) != values["num_hidden_layers"]:
        raise CheckpointError(
            f"{source}: 'layer_types' has {len(kinds)} entries for "
            f"{values['num_hidden_layers']} layers ('num_hidden_layers')"
        )


def _rope(
    raw: Mapping[str, Any],
    of_class: Mapping[str, Any],
    values: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """Rotary parameters as one flat dict, or one for each layer type.

    Every flat dict has rope_type and rope_theta, and where the formula needs them
    partial_rotary_factor and original_max_position_embeddings.
    """
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise CheckpointError(f"{source}: 'rope_parameters' must be an object, not {params!r}")
    params = params or of_class["rope_parameters"] or {}
    kinds = [key for key, value in params.items() if isinstance(value, dict)]
    if kinds:
        return {
            key: None  # layers of this type have no rotation
            if key in params and params[key] is None
            else _flat(params.get(key) or {}, values, source, key)
            for key in dict.fromkeys((*_LAYER_TYPES, *kinds))
        }
    if "rope_theta_by_type" not in of_class:
        return _flat(params, values, source)
    theta = raw.get("rope_local_base_freq")
    local = {} if theta is None else {"rope_theta": theta}
    return {
        "full_attention": _flat(params, values, source, "full_attention"),
        "sliding_attention": _flat(local, values, source, "sliding_attention"),
    }


def _flat(
    params: Mapping[str, Any], values: Mapping[str, Any], source: str, kind: str = ""
) -> dict[str, Any]:
    p = {key: value for key, value in params.items() if value is not None and key != "type"}
    p.setdefault("rope_theta", values.get("rope_theta_by_type", {}).get(kind, values["rope_theta"]))
    if not is_number(p["rope_theta"]) or p["rope_theta"] <= 1:
        raise CheckpointError(f"{source}: 'rope_theta' = {p['rope_theta']!r} must be above 1")
    rope_type = p.get("rope_type") or params.get("type") or "default"
    p["rope_type"] = {"su": "longrope", "mrope": "default"}.get(rope_type, rope_type)
    if "long_factor" in p:
        p["rope_type"] = "longrope"  # old configs call it "yarn"
    share = values.get("partial_rotary_factor", values.get("rotary_pct"))
    if share is not None:
        p.setdefault("partial_rotary_factor", share)
    if p["rope_type"] in ("llama3", "yarn", "longrope"):
        before = values.get("original_max_position_embeddings")
        if before is not None:
            p["original_max_position_embeddings"] = before
        else:
            p.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return p
