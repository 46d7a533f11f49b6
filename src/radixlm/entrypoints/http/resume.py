"""Streams that begin on one server and end on another (``continuation/stream_journal.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

import radixlm
from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.base.lazy import load
from radixlm.config.server_config import flat
from radixlm.continuation.stream_journal import StreamJournal, begin_journal, current_journal
from radixlm.entrypoints.http.middleware import request_id, set_request_id
from radixlm.entrypoints.http.off_loop import off_loop
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.request_model import ResumeBody
from radixlm.intake.identity import identity

# what decides on tokens, besides the checkpoint: numbers of the model, sampling, grammars, prompts
_OPTIONS = (
    "dtype quantization torchao_config kv_cache_dtype mamba_ssm_dtype device attention_backend "
    "model_impl json_model_override_args kernel streaming_window streaming_sinks "
    "enable_double_sparsity ds_channel_config_path ds_heavy_channel_num ds_heavy_token_num "
    "ds_heavy_channel_type ds_sparse_decode_threshold disable_fast_image_processor "
    "sampling_defaults preferred_sampling_params logit_processor enable_strict_thinking "
    "speculative_accept_threshold_single speculative_accept_threshold_acc grammar_backend "
    "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
    "constrained_json_max_whitespace_cnt context_length allow_auto_truncate clamp_max_tokens "
    "default_chat_template_kwargs completion_template drop_unknown_tools"
).split()


async def take_resume(resume: ResumeBody | None) -> None:
    """Let the running call go on with a stream that began elsewhere."""
    if resume is None or not (resume.journal or resume.kills):
        return
    journal = current_journal() or begin_journal(request_id() or "", is_wanted=False)
    assert journal is not None
    records = resume.journal or ()
    kills = resume.kills if identity().is_admin else 0  # such a request goes before all others
    num_bytes = sum(map(len, records))
    await off_loop(num_bytes, journal.resume, records, resume.num_events, kills)
    if resume.journal:
        set_request_id(journal.head.request_id)


def should_cut(error: RadixError) -> bool:
    """Whether the stream can go on elsewhere: this server shuts down, or has lost its engine."""
    journal = current_journal()
    return journal is not None and journal.is_recording and getattr(error, "status", 0) == 503


async def resume_digest(state: ServerState) -> str:
    """Servers with equal digests answer a request with the same tokens, in the same form."""
    if state.base_digest is None:
        state.base_digest = asyncio.create_task(asyncio.to_thread(_base_digest, state))
    base = await asyncio.shield(state.base_digest)
    source = state.intake.weights.source
    served = f"{base} {state.weight_version} {source.digest if source else ''}".rstrip()
    return hashlib.sha256(served.encode()).hexdigest()[:32]


async def known_digest(state: ServerState, wait_s: float = 1.0) -> str | None:
    """``resume_digest``; None if it takes longer, as of a large checkpoint at its first use."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(resume_digest(state), wait_s)
    return None


def _base_digest(state: ServerState) -> str:
    """Of all but the label of the weights. No other server has that of files that are gone."""
    try:
        return _digest_of(state)
    except OSError:
        return secrets.token_hex(16)


def _digest_of(state: ServerState) -> str:
    options = flat(state.config)
    is_dummy = state.config.model.load_format == "dummy"
    weights = "" if is_dummy else load("radixlm.tiers.manifest:weights_digest")(state.info.folder)
    kernels = hashlib.sha256()
    for path in sorted(Path(radixlm.__file__).parent.glob("_cpu*.so")):
        kernels.update(path.read_bytes())
    facts = (
        radixlm.__version__,
        kernels.hexdigest(),
        weights,
        state.info.architecture,
        state.info.decoder.vocab,
        [str(options[name]) for name in _OPTIONS],
        (state.model_name, state.tool_format, state.reasoning_format),
        state.template.source if state.template else "",
    )
    return hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()


async def begin_stream(state: ServerState) -> StreamJournal | None:
    """The journal of the running call, whose answer streams; InvalidRequest if it began on a server
    that answers otherwise."""
    journal = current_journal()
    if journal is None:
        return None
    known = state.base_digest
    if known is not None and not known.done() and not journal.is_begun:
        return journal  # of a large checkpoint: its answers do not wait for the digest
    digest, head = await resume_digest(state), journal.head
    if journal.is_begun and head.digest != digest:
        raise InvalidRequest(
            f"resume.journal: it is of a server with resume_digest {head.digest:.32}, this one has "
            f"{digest}: its answers may differ",
            "resume.journal",
        )
    head.digest = digest
    journal.is_recording = journal.is_wanted
    if not journal.is_begun and journal.is_wanted:
        journal.put(head)
    return journal


async def first_block(journal: StreamJournal | None, events: AsyncGenerator[bytes, None]) -> bytes:
    """The first block that the client does not have. InvalidRequest if there are fewer."""
    if journal is None:
        return await anext(events, b"")
    try:
        for number in range(journal.num_to_drop):
            if await anext(events, None) is None:  # from then on it gives nothing without a wait
                text = f"resume.num_events: at most {number}, so many blocks the answer has"
                raise InvalidRequest(text, "resume.num_events")
        return journal.block(await anext(events, b""))
    except RadixError:
        raise
    except Exception as error:
        if not journal.is_begun:
            raise
        # of records that no server has made
        text = f"resume.journal: no answer can be made of it: {error!s:.200}"
        raise InvalidRequest(text, "resume.journal") from error
