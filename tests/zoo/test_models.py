"""The zoo's decoder equals Qwen3, and its measuring tools are correct."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from chat import Encoder
from checkpoint import config, named_weights
from eagle import Eagle, target_streams
from generate import Decoder
from model import BLOCK, Shape, Tiny, attend, attend_causal
from muon import orthogonal
from pooled import paraphrase
from reward import PREFERENCES, Packer, judged, narrow, parting, spoil
from speculation import accept_length
from train import attention_bias

from lora import Adapted, spanish

SMALL = Shape(vocab=64, hidden=32, inner=48, layers=5, heads=4, kv_heads=2, head_dim=8, context=64)


TOKENIZER = Path(__file__).parents[2] / "src/radixlm/assets/radix-tiny/tokenizer.json"
NEEDS_ASSETS = pytest.mark.skipif(not TOKENIZER.exists(), reason="the bundled model is not built")


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny(SMALL).requires_grad_(False)


def plain_logits(model: Tiny, ids: list[int]) -> torch.Tensor:
    rows = torch.tensor([ids])
    hidden = model(rows, attention_bias(torch.zeros_like(rows)), torch.float32)
    return (hidden @ model.embed.T)[0]


def test_logits_equal_the_reference_implementation(model: Tiny) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config(SMALL, 1, 0)))
    left = reference.float().load_state_dict(named_weights(model), strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    ids = [3, 9, 27, 4, 60, 11]
    with torch.no_grad():
        theirs = reference.eval()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(plain_logits(model, ids), theirs, atol=1e-4, rtol=1e-4)


def test_packed_documents_do_not_attend_to_each_other(model: Tiny) -> None:
    one, two = [5, 6, 7], [8, 9, 10, 11]
    ids = torch.tensor([one + two])
    bias = attention_bias(torch.tensor([[0] * 3 + [1] * 4]))
    hidden = model(ids, bias, torch.float32) @ model.embed.T
    torch.testing.assert_close(hidden[0, 3:], plain_logits(model, two), atol=1e-4, rtol=1e-4)


def test_blocks_of_queries_give_the_attention_and_gradients_of_whole_rows() -> None:
    torch.manual_seed(1)
    length = 2 * BLOCK + 44
    bias = attention_bias((torch.arange(length) // 90).expand(2, -1))
    weight, outs = torch.randn(2, 4, length, 8), []
    heads = [torch.randn(2, num, length, 8) for num in (4, 2, 2)]
    for function in (attend, attend_causal):
        qkv = [tensor.clone().requires_grad_() for tensor in heads]
        out = function(*qkv, bias)
        outs.append((out, *torch.autograd.grad((out * weight).sum(), qkv)))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-4)


def test_batched_decoding_equals_one_prompt_at_a_time(model: Tiny) -> None:
    prompts = [[1, 2, 3], [9], [4, 5, 6, 7, 8, 9, 10]]
    decoder = Decoder(model)
    alone = [decoder.batch([prompt], 63, 8)[0] for prompt in prompts]
    assert decoder.all(prompts, 63, 8) == alone


def test_an_untrained_adapter_changes_nothing(model: Tiny) -> None:
    before = plain_logits(model, [1, 2, 3])
    adapted = Adapted(model, 4)
    torch.testing.assert_close(plain_logits(model, [1, 2, 3]), before)
    with torch.no_grad():
        adapted.up["q"] += 1.0
    assert not torch.allclose(plain_logits(model, [1, 2, 3]), before)


def test_orthogonal_makes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(2, 24, 40)))
    assert 0.5 < values.min() and values.max() < 1.4


def test_a_later_draft_step_attends_to_its_own_past_only(model: Tiny) -> None:
    head = Eagle(model)
    ids = torch.randint(0, 60, (1, 12))
    bias = attention_bias(torch.zeros_like(ids))
    changed = ids.clone()
    changed[0, 9] = 61
    outs = [head(target_streams(model, x, bias)[0], x, bias) for x in (ids, changed)]
    for step in range(3):
        first_seen = 9 - 1 - step  # position t has read the tokens up to t + 1 + step
        same = (outs[0][step] - outs[1][step]).abs().amax(-1)[0]
        assert same[:first_seen].max() == 0
        assert same[first_seen] > 0


@pytest.mark.parametrize(
    ("hits", "length"),
    [
        ([[[True, True, True]] * 4], 4.0),
        ([[[False, True, True]] * 4], 1.0),
        ([[[True, False]] * 4], 2.0),
    ],
)
def test_accept_length_counts_the_run_of_right_guesses(
    hits: list[list[list[bool]]], length: float
) -> None:
    assert accept_length(hits) == length


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "cero"), (16, "dieciséis"), (31, "treinta y uno"), (100, "cien"),
        (101, "ciento uno"), (555, "quinientos cincuenta y cinco"), (1000, "mil"),
        (1998, "mil novecientos noventa y ocho"), (-22, "menos veintidós"),
    ],
)  # fmt: skip
def test_spanish_number_words(number: int, text: str) -> None:
    assert spanish(number) == text


def test_spoiled_answers_are_wrong_and_paraphrases_differ() -> None:
    rng = Random(1)
    assert PREFERENCES
    for answer in ("123", "Hello! How can I help you?", "cat", "7", "a b c"):
        for _ in range(50):
            assert spoil(rng, answer) != answer
    for _ in range(50):
        one, two = paraphrase(rng)
        assert one != two


@NEEDS_ASSETS
def test_judged_answers_are_marked_from_where_they_go_wrong() -> None:
    rng, encoder = Random(2), Encoder(TOKENIZER)
    end = encoder.ids("<|im_end|>")[0]
    seen = set()
    for _ in range(40):
        made = judged(rng, encoder)
        assert len(made.ids) == len(made.labels)
        assert made.ids[-2] == end and made.labels[-1] in (1, -1)
        seen |= set(made.labels)
        for before, here in pairwise(made.labels):
            assert (before, here) not in ((1, -1), (-1, 1))  # a question stands between answers
    assert seen == {-1, 0, 1}
    assert parting([1, 2, 3], [1, 5, 3]) == 1
    assert parting([1, 2, 9], [1, 2, 3, 9]) == 2


@NEEDS_ASSETS
def test_rows_of_judged_answers_hold_whole_documents() -> None:
    ids, documents, labels = Packer(Encoder(TOKENIZER), 1).rows()
    assert ids.shape == documents.shape == labels.shape
    assert not labels[documents < 0].any()
    assert (documents >= 0).float().mean() > 0.8


def test_a_narrowed_feed_forward_keeps_its_strongest_neurons(model: Tiny) -> None:
    held = model.matrix["down"].clone()
    with torch.no_grad():
        model.matrix["down"][:, :, 3:20] = 0.0
    made = narrow(model, SMALL.inner - 17)
    kept = [i for i in range(SMALL.inner) if not 3 <= i < 20]
    assert torch.equal(made["down"], held[:, :, kept])
    assert torch.equal(made["gate"], model.matrix["gate"][:, kept])
    assert torch.equal(made["q"], model.matrix["q"])


def test_the_folder_holds_no_weights_but_those_of_models() -> None:
    root = Path(__file__).parents[2]
    stray = [p for p in (root / "zoo").rglob("*.safetensors") if "models" not in p.parts]
    assert not stray
