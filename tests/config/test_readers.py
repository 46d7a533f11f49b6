"""An option that "works" has a reader: no flag is accepted and forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import radixlm
from radixlm.config.table import Option, options

SOURCE = Path(radixlm.__file__).parent

WITHOUT_READER = frozenset(
    """
    admin_api_key api_key api_key_file bucket_e2e_request_latency bucket_inter_token_latency
    bucket_time_to_first_token collect_tokens_histogram decode_attention_backend
    decode_log_interval disable_hybrid_swa_memory disable_overlap_schedule drain_timeout
    enable_cache_report enable_metrics engine_in_process generation_tokens_buckets host
    hybrid_kvcache_ratio json_model_override_args log_level_http log_requests log_requests_level
    max_request_bytes model_impl port preferred_sampling_params prefill_attention_backend
    prompt_tokens_buckets reasoning_parser served_model_name skip_server_warmup stream_output
    swa_full_tokens_ratio tokenizer_worker_num tool_call_parser
    """.split()
)
"""Options that claim to work although nothing reads them yet. Only ever remove names from here:
a new option gets its reader, or the state "planned", in the same change."""


def has_a_choice(option: Option) -> bool:
    """Whether more than one value of a working option is built."""
    flag = option.flag
    return flag.state == "works" and (flag.built is None or len(flag.built) > 1)


def test_every_working_option_is_read_somewhere() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / "config"
    )
    read = set(re.findall(r"\.([a-z][a-z0-9_]*)\b", text))
    working = {name for name, option in options().items() if has_a_choice(option)}
    assert working - read - WITHOUT_READER == set()
    assert working >= WITHOUT_READER
