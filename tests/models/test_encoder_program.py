"""An encoder as one program: equal to its layers one by one, the same bits in any step."""

from __future__ import annotations

import pytest
import torch
from tests.fakes.paged_runner import load_model
from tests.fakes.pooled_checkpoint import made
from torch import Tensor

from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.models.encoders.text import EncoderModel
from radixlm.step.batch import ForwardBatch

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

COVERED = (
    *("BertModel", "XLMRobertaModel", "XLMRobertaXLModel", "ElectraModel", "DistilBertModel"),
    *("AlbertModel", "NomicBertModel", "GteModel", "JinaEmbeddingsV3Model", "EuroBertModel"),
)
REFUSED = ("MPNetModel", "T5EncoderModel", "DebertaV2Model")  # tables of distances
WINDOW = 5  # of ModernBERT's tiny checkpoint: 8 tokens, half on each side


def hidden(model: EncoderModel, texts: list[list[int]]) -> list[Tensor]:
    """Hidden states of each text, in one step: [N, D]."""
    lengths = [len(text) for text in texts]
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    starts_S1 = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    batch = ForwardBatch(
        token_ids_T=torch.tensor([token for text in texts for token in text]),
        positions_T=positions_T,
        rope_len_T=positions_T + 1,
        query_start_S1=starts_S1,
        kv_len_S=torch.tensor(lengths).int(),
        page_table_GSP=(),
        store_GT=(),
        logits_rows_R=torch.tensor([], dtype=torch.int64),
        attn=None,
        max_query_len=longest,
        max_kv_len=longest,
    )
    with torch.inference_mode():
        return list(model.forward(batch).split(lengths))


def loaded(architecture: str) -> EncoderModel:
    model = load_model(made(architecture), bind("cpu"))
    assert isinstance(model, EncoderModel)
    return model


def texts_of(*lengths: int) -> list[list[int]]:
    return [[3 + (7 * n + i * i) % 110 for i in range(n)] for n in lengths]


@pytest.mark.parametrize("architecture", COVERED)
def test_a_program_equals_its_layers(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more scratch pages than at first."""
    model, few, many = loaded(architecture), texts_of(19, 1, 33), texts_of(*range(1, 60, 2), 97)
    for texts in (few, many):
        with monkeypatch.context() as patch:
            patch.setattr(model, "_run_layers", lambda _: pytest.fail("not by the program"))
            together = hidden(model, texts)
        model.use_program, model.program = False, None
        for ours, layers in zip(together, hidden(model, texts), strict=True):
            assert (ours - layers).abs().max() < 2e-5 * layers.abs().max()
        model.finish()
        model.use_program = True
        for text, whole in zip(texts, together, strict=True):
            assert torch.equal(hidden(model, [text])[0], whole), "alone or among others"


@pytest.mark.parametrize("architecture", REFUSED)
def test_tables_of_distances_run_layer_by_layer(architecture: str) -> None:
    model = loaded(architecture)
    hidden(model, texts_of(5))
    assert model.program is None


def test_texts_beyond_a_window_run_layer_by_layer() -> None:
    model = loaded("ModernBertModel")
    hidden(model, texts_of(3))
    program = model.program
    assert program is not None
    lengths = [program.longest, program.longest + 1]
    assert lengths[0] == WINDOW
    short, long = (hidden(model, texts_of(n))[0] for n in lengths)
    model.use_program, model.program = False, None
    want_short, want_long = (hidden(model, texts_of(n))[0] for n in lengths)
    assert (short - want_short).abs().max() < 2e-5 * want_short.abs().max()
    assert torch.equal(long, want_long)
    model.finish()
    model.use_program = True
    together = hidden(model, texts_of(lengths[1], lengths[0], 9))
    assert torch.equal(together[0], long) and torch.equal(together[1], short)
