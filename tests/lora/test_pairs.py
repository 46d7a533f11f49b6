"""Adapters together with other features: a batch of the base and two adapters of the bundled model
gives the tokens that it gives without the feature."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import radixlm
from radixlm.kernels.ops.linear import Gated, ReferenceLinear
from radixlm.lora.adapter import read_adapter
from radixlm.lora.targets import AdapterTargets
from radixlm.quant.load_time import make_scheme
from tests.end_to_end.server import RunningServer
from tests.engine.drafted_engine import drafted_engine, follower
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.lora.test_run import Adapted

ZOO = Path(__file__).parents[2] / "zoo" / "models"
PATHS = [f"{name}={ZOO / f'radix-tiny-lora-{name}'}" for name in ("upper", "spanish")]
PROMPTS = (
    "user\nWhat is 950 plus 100?\nassistant\n", "a small house sat on the number two",
    "user\nWrite this text again: the old house is small, the old house is big.\nassistant\n",
)  # fmt: skip
ROWS = [(prompt, name) for prompt in PROMPTS for name in (None, "upper", "spanish")]
GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
TIGHT = {"max_total_tokens": 160, "page_size": 4, "schedule_conservativeness": 0.0}
DRAWN = {**GREEDY, "temperature": 0.8, "sampling_seed": 5}


class Asked:
    """An engine of the bundled model with two adapters."""

    own: ClassVar[dict[str, Any]] = {
        "model_path": "radix-tiny", "cpu_threads": 1, "log_level": "error", "random_seed": 1,
        "lora_paths": PATHS,
    }  # fmt: skip

    def __init__(self, engine: radixlm.Engine) -> None:
        self.engine = engine

    @classmethod
    @contextmanager
    def opened(cls, **options: Any) -> Iterator[Asked]:
        with radixlm.Engine(**{**cls.own, **options}) as engine:
            yield cls(engine)

    def rows(self, sampling: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        """The answers of one batch."""
        prompts, names = [row[0] for row in ROWS], [row[1] for row in ROWS]
        found: list[dict[str, Any]] = self.engine.generate(
            prompts, sampling, lora_path=names, **fields
        )
        return found

    def tokens(self, sampling: dict[str, Any]) -> list[list[int]]:
        return [row["output_ids"] for row in self.rows(sampling)]


@pytest.fixture(scope="module")
def plain() -> Iterator[Asked]:
    with Asked.opened() as asked:
        yield asked


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3", "STANDALONE"])
def test_drafters(algorithm: str, plain: Asked) -> None:
    # where steps of a tiny model decode several tokens in turn, drafts seldom pay
    options = {"speculative_algorithm": algorithm, "num_continuous_decode_steps": 1}
    with Asked.opened(**options) as asked:
        greedy, drawn = asked.rows(GREEDY), asked.rows(DRAWN)
        proposed = _num_proposed(greedy)
        for _ in range(4):  # whether a draft is worth its time is measured, on a busy machine too
            proposed = proposed or _num_proposed(asked.rows(GREEDY))
    assert [row["output_ids"] for row in greedy] == plain.tokens(GREEDY)
    assert [row["output_ids"] for row in drawn] == plain.tokens(DRAWN)
    assert proposed > 0


def _num_proposed(rows: list[dict[str, Any]]) -> int:
    return sum(row["meta_info"]["spec_num_proposed_drafts"] for row in rows)


@pytest.mark.parametrize(("kind", "algorithm"), [("mixed", None), ("device", "EAGLE3")])
def test_drafts_of_any_length(kind: str, algorithm: str | None, plain: Asked) -> None:
    """Of every row and step, whether they pay or not."""
    wanted = plain.rows(DRAWN)
    assert plain.engine.tokenizer is not None
    ids = [plain.engine.tokenizer.encode(prompt) for prompt, _ in ROWS]
    known = [[*a, *row["output_ids"]] for a, row in zip(ids, wanted, strict=True)]
    drafts = ForcedDrafts(follower(known), kind, most=4, varies=True)
    more = {} if algorithm is None else {"speculative_algorithm": algorithm}
    with drafted_engine(drafts, **Asked.own, **more) as engine:
        found = Asked(engine).rows(DRAWN)
    assert [row["output_ids"] for row in found] == [row["output_ids"] for row in wanted]
    facts = [row["meta_info"] for row in found]
    assert min(one["spec_num_proposed_drafts"] for one in facts) > 3
    if kind == "mixed":
        assert min(one["spec_num_correct_drafts"] for one in facts) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 16},
        TIGHT,
        {**TIGHT, "max_loras_per_batch": 1},
        {**TIGHT, "speculative_algorithm": "EAGLE3"},
        {"max_loras_per_batch": 1},
        {"disable_radix_cache": True, "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_schedules_and_pools(options: dict[str, Any], plain: Asked) -> None:
    with Asked.opened(**options) as asked:
        found = asked.rows(DRAWN)
    assert [row["output_ids"] for row in found] == plain.tokens(DRAWN)
    if "max_total_tokens" in options:
        assert sum(row["meta_info"]["num_retractions"] for row in found) > 0


def test_several_samples_and_grammars(plain: Asked) -> None:
    wanted = plain.tokens(GREEDY)
    several = plain.tokens({**GREEDY, "n": 2})
    assert several == [tokens for tokens in wanted for _ in range(2)]
    schema = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 12}}}
    schema |= {"required": ["text"], "additionalProperties": False}
    bound = {"temperature": 0.0, "max_new_tokens": 60, "json_schema": json.dumps(schema)}
    together = plain.rows(bound)
    texts = [json.loads(row["text"])["text"] for row in together]
    assert len(set(texts)) > 2
    for (prompt, name), text in zip(ROWS[:6], texts, strict=False):
        alone = plain.engine.generate(prompt, bound, lora_path=name)
        assert json.loads(alone["text"])["text"] == text


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_quantized_caches(dtype: str, plain: Asked) -> None:
    """The numbers are near those of a 16 bit cache: nearer than those of another adapter."""
    options = {"return_logprob": True, "logprob_start_len": 0}
    with Asked.opened(kv_cache_dtype=dtype) as asked:
        near, again = (asked.rows({"max_new_tokens": 1}, **options) for _ in range(2))
    exact = plain.rows({"max_new_tokens": 1}, **options)
    most = 0.6 if dtype == "fp8_e5m2" else 0.25  # two bits of mantissa are few
    sets = [
        [
            torch.tensor([one[0] for one in row["meta_info"]["input_token_logprobs"][1:]])
            for row in f
        ]
        for f in (near, again, exact)
    ]
    for index, (a, b, c) in enumerate(zip(*sets, strict=True)):
        other = sets[2][index - 1 if index % 3 else index + 1]
        assert torch.equal(a, b) and (a - c).abs().mean() < most * (other - c).abs().mean(), index


@pytest.mark.parametrize("quantization", ["int8wo", "w8a8_int8", "int4wo-32", "fp8"])
def test_quantized_bases(quantization: str, tmp_path: Path) -> None:
    """As near to the sum of the dequantized weights and ``s B A`` as the base model's numbers are
    to those of its dequantized weights; in any company the same bits."""
    base = cached_tiny("Qwen3ForCausalLM")
    folder = write_adapter(base, tmp_path / "a", 3, seed=1)
    adapted = Adapted(base, [folder], scheme=make_scheme(quantization))
    got = adapted.run({0: 0, 1: -1})
    assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])
    adapted_error, base_error = (
        (got[sequence] - exact).norm() / exact.norm()
        for sequence, exact in enumerate(
            dense(base, adapted, adapters)[i] for i, adapters in enumerate(([folder], []))
        )
    )
    assert adapted_error < 1.5 * base_error < 0.1, (adapted_error, base_error)
    assert (got[0] - got[1]).norm() > 0.5 * got[1].norm()


def dense(base: Path, quantized: Adapted, adapters: list[Path]) -> dict[int, torch.Tensor]:
    """Logits of sequences 0 and 1 with the weights that the quantized layers hold, in float32, and
    these adapters added to them."""
    whole = Adapted(base, [], "reference")
    layers = AdapterTargets(whole.model).sites
    targets = AdapterTargets(quantized.model)
    parts = [read_adapter(folder, targets).parts for folder in adapters]
    for path, layer in layers.items():
        weight_OI = targets.sites[path].packed.unpack().float().clone()
        for part in (one for each in parts for one in each.get(path, ())):
            rows = slice(part.first, part.first + len(part.b_OR))
            weight_OI[rows] += part.scale * (part.b_OR @ part.a_RI)
        plain = ReferenceLinear(weight_OI, None)
        layer.packed = Gated(plain, layer._gate_act) if layer._gate_act else plain
        layer.run = layer.packed.run
    return whole.run({0: -1, 1: -1})


def test_replicas(plain: Asked) -> None:
    """Both engines get an adapter that is loaded while they run."""
    own, late = PATHS
    name, _, path = late.partition("=")
    flags = ("--dp-size", "2", "--max-total-tokens", "8192", "--lora-paths", own)
    prompts, names = [row[0] for row in ROWS], [row[1] for row in ROWS]
    body = {"text": prompts, "lora_path": names, "sampling_params": GREEDY}
    with RunningServer(*flags, model="radix-tiny") as server:
        loaded = server.post("/load_lora_adapter", lora_name=name, lora_path=path).json()
        assert loaded["success"] and len(loaded["loaded_adapters"]) == 2
        for rank in (0, 1):
            until_s = time.monotonic() + 60
            while not server.client.get("/get_server_info").json()["replicas"][rank]["is_ready"]:
                assert time.monotonic() < until_s
                time.sleep(0.05)
            found = server.post("/generate", **body, data_parallel_rank=rank).json()
            assert [row["output_ids"] for row in found] == plain.tokens(GREEDY)
        assert server.post("/unload_lora_adapter", lora_name=name).json()["success"]
