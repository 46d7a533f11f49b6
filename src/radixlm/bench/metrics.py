"""Latencies and throughput of a run, named as in SGLang's result files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.text.tokenizer import Tokenizer

PERCENTILES = (90, 95, 99)


def spread_ms(values_s: Sequence[float], name: str) -> dict[str, float]:
    """Mean, median, standard deviation, percentiles and maximum in ms; zeros for no values."""
    ms = np.asarray(values_s if len(values_s) else [0.0], np.float64) * 1e3
    figures = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    for percent in PERCENTILES:
        figures[f"p{percent}_{name}_ms"] = float(np.percentile(ms, percent))
    return figures | {f"max_{name}_ms": float(ms.max())}


def count_missing(outcomes: Sequence[Outcome], rows: Sequence[Row], tokenizer: Tokenizer) -> None:
    """Fill in token counts that the server did not report, with the tokenizer."""
    for outcome, row in zip(outcomes, rows, strict=True):
        if outcome.num_prompt < 0:
            outcome.num_prompt = row.num_prompt
        if outcome.num_output < 0:
            outcome.num_output = len(tokenizer.encode(outcome.text, False)) if outcome.is_ok else 0


def summarise(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Figures of the successful requests. Call `count_missing` first."""
    good = [outcome for outcome in outcomes if outcome.is_ok]
    num_input = sum(outcome.num_prompt for outcome in good)
    num_output = sum(outcome.num_output for outcome in good)
    tpots_s = [(o.latency_s - o.ttft_s) / (o.num_output - 1) for o in good if o.num_output > 1]
    return {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(outcome.num_cached for outcome in good),
        "request_throughput": len(good) / duration_s,
        "input_throughput": num_input / duration_s,
        "output_throughput": num_output / duration_s,
        "total_throughput": (num_input + num_output) / duration_s,
        "concurrency": sum(outcome.latency_s for outcome in good) / duration_s,
        **spread_ms([outcome.latency_s for outcome in good], "e2e_latency"),
        **spread_ms([outcome.ttft_s for outcome in good], "ttft"),
        **spread_ms(tpots_s, "tpot"),
        **spread_ms([itl_s for outcome in good for itl_s in outcome.itls_s], "itl"),
    }


def retokenized(
    outcomes: Sequence[Outcome], tokenizer: Tokenizer, duration_s: float
) -> dict[str, Any]:
    """Output tokens counted again from the text, to check the server's count."""
    texts = [outcome.text for outcome in outcomes if outcome.is_ok]
    count = sum(len(ids) for ids in tokenizer.encode_batch(texts, False))
    return {
        "total_output_tokens_retokenized": count,
        "output_throughput_retokenized": count / duration_s,
    }


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The values of every request, for `--output-details`."""
    return {
        "input_lens": [outcome.num_prompt for outcome in outcomes],
        "output_lens": [max(outcome.num_output, 0) for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
