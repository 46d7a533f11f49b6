"""Heads of embedding, classification and reward models."""

import re
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.names import Name
from radixlm.arch.spec import Attention, Decoder, Dense, Encoder, Norm, Pool
from radixlm.base.record import replace

_SQUASHINGS = {"sigmoid": "sigmoid", "identity": "", "softmax": "softmax"}


def labels(c: Config) -> tuple[str, ...]:
    """Names of the scores: id2label, else LABEL_0 and so on for num_labels (default 2)."""
    named = c.get("id2label") or {}
    if not isinstance(named, dict) or not all(str(key).isdigit() for key in named):
        raise c.error("id2label", "must map numbers to names")
    if named:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    count = c.get("num_labels", 2)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1 << 20:
        raise c.error("num_labels", f"= {count!r} must be a positive integer")
    return tuple(f"LABEL_{i}" for i in range(count))


def score_activation(c: Config) -> Any:
    """The activation of a cross-encoder's scores as sentence-transformers stores it, else none."""
    notes = c.get("sentence_transformers")
    noted = notes.get("activation_fn") if isinstance(notes, dict) else None
    name = noted or c.get("sbert_ce_default_activation_function") or "Identity"
    kind = re.sub(r".*\.", "", str(name)).lower()
    if kind not in _SQUASHINGS:
        raise c.error("sentence_transformers", f"names the activation {name!r}, which is unknown")
    return _SQUASHINGS[kind]


def dimensions(c: Config) -> tuple[int, ...]:
    """Lengths to which the config allows a vector to be cut; () = any."""
    listed = c.get("matryoshka_dimensions") or ()
    if not all(isinstance(one, int) and one > 0 for one in listed):
        raise c.error("matryoshka_dimensions", "must be a list of positive integers")
    return tuple(listed)


def is_bidirectional(c: Config) -> bool:
    """Whether a decoder's config asks for bidirectional attention."""
    return c.get("is_causal") is False or bool(c.get("use_bidirectional_attention"))


def with_bidirectional_attention(c: Config, decoder: Decoder) -> Decoder:
    """The decoder as an encoder; CheckpointError where its attention is causal only."""
    mixers = [block.mixer for block in decoder.blocks]
    if not all(isinstance(m, Attention) and not m.sinks and m.extras is None for m in mixers):
        raise c.error("is_causal", f"= false is not supported for {c.architecture}")
    return replace(decoder, encoder=Encoder())


def vectors(c: Config, decoder: Decoder, pooling: str = "last") -> Decoder:
    """The decoder as an embedding model: vectors of unit length."""
    return pooled(decoder, Pool(pooling, after="unit", dimensions=dimensions(c)))


def pooled(decoder: Decoder, pool: Pool, **names: Name) -> Decoder:
    """The decoder with ``pool``. ``names`` are those of its roles ("pool_0" for "pool.0"). The
    output head is the token table, which no step runs."""
    roles = {role.replace("_", ".", 1): name for role, name in names.items()}
    decoder = replace(decoder, logit_scale=1.0, logit_softcap=0.0, head_bias=False)
    return replace(decoder, pool=pool, tied=True, names={**decoder.names, **roles})


def scores(
    c: Config,
    decoder: Decoder,
    out: Name = "score",
    before: tuple[tuple[Dense | Norm, Name], ...] = (),
    *,
    pooling: str = "last",
    bias: bool = False,
    **fields: Any,
) -> Decoder:
    """The decoder as a classifier or reward model: layers ``before``, then a score a label."""
    named = fields.pop("labels", None) or labels(c)
    steps = tuple(step for step, _ in before)
    width = next((s.outputs for s in reversed(steps) if isinstance(s, Dense)), decoder.dim)
    head = (*steps, Dense(width, len(named), bias=bias))
    fields.setdefault("after", score_activation(c))
    names = {f"pool_{i}": name for i, (_, name) in enumerate(before)} | {f"pool_{len(before)}": out}
    pool = Pool(pooling, head, gives="scores", labels=named, **fields)
    return pooled(decoder, pool, **names)
