"""Decoders that give vectors or scores: embedding, classification and reward models."""

from __future__ import annotations

import re

from radixlm.arch.config import Config
from radixlm.arch.families.pools import (
    dimensions,
    is_bidirectional,
    labels,
    pooled,
    scores,
    vectors,
    with_bidirectional_attention,
)
from radixlm.arch.names import AnyOf
from radixlm.arch.registry import ARCHITECTURES, find
from radixlm.arch.spec import (
    Attention,
    Block,
    CenteredConv,
    Decoder,
    Dense,
    Encoder,
    Pool,
    ShortConv,
)
from radixlm.base.record import replace

_CAUSAL = ("ForCausalLM", "LMHeadModel")
STEP_MARK = 151651  # <extra_0>, which ends a step for the process reward models of Qwen


def body(base: str, c: Config) -> Decoder:
    """The decoder of the architecture ``base``, bidirectional where the config says so."""
    values = {key: c.get(key) for key in c} | {"use_bidirectional_attention": False}
    decoder = find(base)(Config(values, c.source, {key for key in c if c.is_explicit(key)}))
    return with_bidirectional_attention(c, decoder) if is_bidirectional(c) else decoder


def base_of(architecture: str) -> str:
    """The language model around which <stem>Model, <stem>ForSequenceClassification and
    <stem>ForTokenClassification are made."""
    ends = r"(Text|Embedding)?(Model|For(Sequence|Token)Classification)$"
    stem = re.sub(ends, "", architecture)
    return next(f"{stem}{end}" for end in _CAUSAL if f"{stem}{end}" in ARCHITECTURES)


def embedding(c: Config) -> Decoder:
    """<stem>Model: vectors of the last token."""
    return vectors(c, body(base_of(c.architecture), c))


def classifier(c: Config) -> Decoder:
    """<stem>ForSequenceClassification: a linear layer over the last token."""
    return scores(c, body(base_of(c.architecture), c))


def token_classifier(c: Config) -> Decoder:
    """<stem>ForTokenClassification: a linear layer over each token."""
    bias = bool(c.get("token_classification_bias", True))
    decoder = body(base_of(c.architecture), c)
    return scores(c, decoder, AnyOf("score", "classifier"), pooling="steps", bias=bias)


def ctrl_classifier(c: Config) -> Decoder:
    return scores(c, body("CTRLLMHeadModel", c), "classifier")


def llama_bidirectional(c: Config) -> Decoder:
    return vectors(c, *_averaged_llama(c))


def llama_bidirectional_classifier(c: Config) -> Decoder:
    c.refuse("temperature", 1)
    decoder, pooling = _averaged_llama(c)
    return scores(c, decoder, pooling=pooling)


def _averaged_llama(c: Config) -> tuple[Decoder, str]:
    """A bidirectional Llama and its pooling."""
    pooling = {"avg": "mean", "cls": "cls", "last": "last"}.get(c.get("pooling", "avg"), "mean")
    return with_bidirectional_attention(c, body("LlamaForCausalLM", c)), pooling


def lfm2_bidirectional(c: Config) -> Decoder:
    """LFM2 whose attention and convolutions see both sides; the vector of the first token."""
    decoder = find("Lfm2ForCausalLM")(c)

    def both_sides(block: Block) -> Block:
        conv = block.mixer
        if not isinstance(conv, ShortConv):
            return block
        return replace(block, mixer=CenteredConv(conv.channels, conv.width, conv.bias))

    blocks = tuple(both_sides(block) for block in decoder.blocks)
    parts = {f"mixer.{part}": decoder.names[f"state.{part}"] for part in ("inp", "conv", "out")}
    names = {**decoder.names, **parts}
    return vectors(c, replace(decoder, blocks=blocks, encoder=Encoder(), names=names), "cls")


def jina_v5(c: Config) -> Decoder:
    """A Qwen 3 with the adapter of one task, see ``registry.TASK_ADAPTERS``."""
    return vectors(c, body("Qwen3ForCausalLM", c))


def voyage(c: Config) -> Decoder:
    """A bidirectional Qwen 3 whose mean vector is projected; 2048 channels unless the config has
    another number."""
    decoder = with_bidirectional_attention(c, body("Qwen3ForCausalLM", c))
    head = (Dense(c.hidden_size, c.get("num_labels", 2048), bias=False),)
    pool = Pool("mean", head, "unit", dimensions=dimensions(c))
    return pooled(decoder, pool, pool_0="linear")


def gemma3_text(c: Config) -> Decoder:
    return vectors(c, _gemma3(c), "mean" if c.get("use_bidirectional_attention") else "last")


def gemma3_classifier(c: Config) -> Decoder:
    return scores(c, _gemma3(c))


def cohere_compass_classifier(c: Config) -> Decoder:
    c.refuse("pooling", "eos")
    return scores(c, body("CohereCompassForCausalLM", c))


def modernbert_decoder_classifier(c: Config) -> Decoder:
    """The dense layer before the language head is the first layer of the classifier."""
    decoder = body("ModernBertDecoderForCausalLM", c)
    layer = decoder.head_layer
    assert layer is not None, "the family gives it one"
    dense = Dense(c.hidden_size, c.hidden_size, layer.act, layer.bias)
    before = ((dense, "head.dense"), (layer.norm, "head.norm"))
    plain = replace(decoder, head_layer=None)
    return scores(c, plain, "classifier", before, bias=c.classifier_bias)


def _gemma3(c: Config) -> Decoder:
    """The bidirectional model's windows reach half as far in each direction."""
    decoder = body("Gemma3ForCausalLM", c)
    if decoder.encoder is None:
        return decoder

    def halved(mixer: Attention) -> Attention:
        return replace(mixer, window=mixer.window // 2 + 1) if mixer.window else mixer

    blocks = tuple(
        replace(b, mixer=halved(b.mixer)) if isinstance(b.mixer, Attention) else b
        for b in decoder.blocks
    )
    return replace(decoder, blocks=blocks)


def embedding_gemma2(c: Config) -> Decoder:
    """Gemma 4 with bidirectional attention; per-layer inputs come from the embedding alone."""
    decoder = find("Gemma4ForCausalLM")(
        c.replace(
            tie_word_embeddings=True,
            use_bidirectional_attention=None,
            attention_k_eq_v=False,
            num_kv_shared_layers=0,
            enable_moe_block=False,
            use_double_wide_mlp=False,
            final_logit_softcapping=None,
            vocab_size_per_layer_input=0,
            sliding_window=c.sliding_window + 1,  # itself beside so many to either side
            layer_types=c.layer_types or gemma_kinds(c, c.sliding_window_pattern),
        )
    )
    own, block = "model.ple.per_layer_", "model.layers.{i}.ple_block."
    names = {
        **decoder.names,
        "inputs.project": own + "model_projection",
        "inputs.project_norm": own + "projection_norm",
        "layer_input.gate": block + "per_layer_input_gate",
        "layer_input.out": block + "per_layer_projection",
        "layer_input.norm": block + "post_per_layer_input_norm",
    }
    head = (Dense(c.hidden_size, c.embedding_dim, bias=False),)
    pool = Pool("mean", head, "unit", dimensions=dimensions(c))
    bidirectional = replace(decoder, encoder=Encoder(), names=names)
    return pooled(bidirectional, pool, pool_0="model.embedding_projection")


def gemma_kinds(c: Config, every: int) -> list[str]:
    """Layer types where each ``every``-th layer is full."""
    layers = range(1, c.num_hidden_layers + 1)
    return ["sliding_attention" if i % every else "full_attention" for i in layers]


def llama_classification(c: Config) -> Decoder:
    """Scores at the end token."""
    eos = c.get("eos_token_id", ())
    names = tuple(f"LABEL_{i}" for i in range(c.classification_out_size))
    return scores(
        c,
        body("LlamaForCausalLM", c),
        "classification_head",
        labels=names,
        bias=bool(c.get("classification_bias")),
        pooling="marked",
        marks=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def llama_weighted(c: Config) -> Decoder:
    """Pairs of scores, the first of each multiplied by a second head."""
    dim, names = c.hidden_size, labels(c)
    gate = (Dense(dim, dim, "selu"), Dense(dim, dim, "selu"), Dense(dim, len(names) // 2))
    pool = Pool("last", (Dense(dim, len(names), bias=False),), "gated", "scores", gate=gate)
    return pooled(
        body("LlamaForCausalLM", c),
        pool,
        pool_0="score",
        gate_0="weights.fc.0",
        gate_1="weights.fc.2",
        gate_2="weights.fc.4",
    )


def internlm2_reward(c: Config) -> Decoder:
    return scores(c, body("InternLM2ForCausalLM", c), "v_head", labels=("reward",))


def llama_reward(c: Config) -> Decoder:
    head = AnyOf("v_head", "score", "reward_head")
    return scores(c, body("LlamaForCausalLM", c), head, labels=("reward",))


def _reward(base: str, c: Config, pooling: str = "last", **fields: object) -> Decoder:
    """Two layers: score.0, a ReLU, score.2."""
    hidden = Dense(c.hidden_size, c.hidden_size, "relu")
    before = ((hidden, "score.0"),)
    return scores(c, body(base, c), "score.2", before, pooling=pooling, bias=True, **fields)


def qwen2_reward(c: Config) -> Decoder:
    return _reward("Qwen2ForCausalLM", c, labels=("reward",) * c.get("num_labels", 1))


def qwen3_reward(c: Config) -> Decoder:
    return _reward("Qwen3ForCausalLM", c, labels=("reward",) * c.get("num_labels", 1))


def qwen2_process_reward(c: Config) -> Decoder:
    """The probability that each step is right, in the order of the steps."""
    mark = c.get("step_tag_id", STEP_MARK)
    fields = {"marks": (mark,), "after": "second", "labels": ("wrong", "right")}
    return _reward("Qwen2ForCausalLM", c, "steps", **fields)
