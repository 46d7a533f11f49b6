"""Messages between processes survive a round trip, and nothing else is decoded."""

from __future__ import annotations

import pickle
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvariantError
from radixlm.wire import codec as codec_module
from radixlm.wire.codec import Codec, intake_codec, scheduler_codec
from radixlm.wire.replies import (
    ControlReply,
    Failed,
    Finish,
    Heartbeat,
    LoadReport,
    Logprobs,
    Ready,
    StepReply,
    TokenDelta,
)
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    GrammarSpec,
    LogprobParams,
    Shutdown,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams

QUIET = settings(max_examples=60, deadline=None, derandomize=True, database=None)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
FLOATS = st.floats(allow_nan=False, width=64)
PAIRS = st.tuples(FLOATS, st.integers(0, 2**31))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    temperature=st.floats(0, 10),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), FLOATS, max_size=3),
    sampling_seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    custom_params=st.none() | st.dictionaries(TEXT, DATA, max_size=2),
)
FINISH = st.builds(
    Finish,
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.none() | TEXT | st.integers(0, 2**31),
    st.none() | TEXT,
    st.integers(0, 599),
    st.none() | FLOATS,
)
LOGPROBS = st.builds(
    Logprobs,
    st.lists(st.tuples(st.none() | FLOATS, st.integers(0, 2**31)), max_size=3),
    st.lists(st.none() | st.lists(PAIRS, max_size=2), max_size=3),
    st.lists(st.none() | st.lists(PAIRS, max_size=2), max_size=3),
)
DELTA = st.builds(
    TokenDelta,
    rid=TEXT,
    tokens=IDS,
    finish=st.none() | FINISH,
    logprobs=st.none() | LOGPROBS,
    prompt_logprobs=st.none() | LOGPROBS,
    hidden_states=st.none() | st.lists(st.binary(max_size=9), max_size=2),
    pooled=st.none() | st.lists(FLOATS, max_size=3),
)
TO_SCHEDULER = st.one_of(
    st.builds(
        TokenizedRequest,
        rid=TEXT.filter(bool),
        input_ids=IDS.map(pack_ids),
        sampling=SAMPLING,
        logprobs=st.none() | st.builds(LogprobParams, st.integers(-1, 9), st.integers(0, 9)),
        grammar=st.none() | st.builds(GrammarSpec, TEXT, TEXT, st.none() | TEXT),
        embeds=st.none() | st.binary(max_size=3).map(lambda b: b * 4),
        priority=st.integers(-(2**31), 2**31),
        deadline_s=FLOATS,
        cache_salt=st.none() | TEXT,
        extra_key=st.none() | TEXT,
        tenant=st.none() | TEXT,
        is_quarantined=st.booleans(),
    ),
    st.builds(
        AbortRequest, st.lists(TEXT, max_size=3).map(tuple), st.booleans(), st.booleans(), TEXT
    ),
    st.builds(Control, TEXT, TEXT, st.dictionaries(TEXT, DATA, max_size=3)),
    st.just(Shutdown()),
)
TO_INTAKE = st.one_of(
    st.builds(StepReply, st.lists(DELTA, max_size=3), st.none() | st.builds(LoadReport)),
    st.builds(Ready, st.dictionaries(TEXT, DATA, max_size=3)),
    st.builds(Heartbeat, st.builds(LoadReport, st.integers(0, 9), gen_throughput=FLOATS)),
    st.builds(ControlReply, TEXT, st.booleans(), TEXT, DATA),
    st.builds(Failed, TEXT, TEXT),
)


@QUIET
@given(TO_SCHEDULER)
def test_scheduler_records_round_trip(message: Any) -> None:
    codec = scheduler_codec()
    assert codec.decode(codec.encode(message)) == message


@QUIET
@given(TO_INTAKE)
def test_intake_records_round_trip(message: Any) -> None:
    codec = intake_codec()
    assert codec.decode(codec.encode(message)) == message


def _decode_or_refuse(codec: Codec, data: bytes) -> bool:
    """Whether it was refused; any error but InvariantError fails the test."""
    try:
        codec.decode(data)
    except InvariantError:
        return True
    return False


def test_2000_strings_of_bytes_do_no_harm() -> None:
    rng = random.Random(8)
    codecs = (scheduler_codec(), intake_codec())
    refused = sum(
        _decode_or_refuse(codecs[i % 2], rng.randbytes(rng.choice((1, 3, 20, 200))))
        for i in range(2000)
    )
    assert refused == 2000


SAMPLES: list[tuple[Codec, Any]] = [
    (
        scheduler_codec(),
        TokenizedRequest("r", pack_ids([1, 2, 3]), SamplingParams(stop=("x",), top_k=3)),
    ),
    (scheduler_codec(), Control("c", "pause", {"mode": "abort", "n": [1, {"a": None}]})),
    (scheduler_codec(), AbortRequest(("a", "b"), message="m")),
    (
        intake_codec(),
        StepReply(
            [TokenDelta("r", [1, 2], Finish("stop", matched=2), logprobs=Logprobs([(-1, 2)]))]
        ),
    ),
    (intake_codec(), ControlReply("c", True, data={"x": [1.5, None]})),
]


def test_2000_damaged_messages_do_no_harm() -> None:
    rng = random.Random(9)
    refused = 0
    for i in range(2000):
        codec, message = SAMPLES[i % len(SAMPLES)]
        data = bytearray(codec.encode(message))
        for _ in range(rng.randint(1, 4)):
            kind, at = rng.randrange(4), rng.randrange(len(data))
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at:at] = rng.randbytes(rng.randint(1, 6))
            elif kind == 2 and len(data) > 8:
                del data[at : at + rng.randint(1, 6)]
            else:
                data[at] ^= 1 << rng.randrange(8)
        refused += _decode_or_refuse(codec, bytes(data))
    assert 1000 < refused < 2000  # some flips only change a character


def _control(args: bytes) -> bytes:
    return b"\x84\xa4type\xa7control\xa7call_id\xa1a\xa4verb\xa1b\xa4args" + args


@pytest.mark.parametrize(
    "data",
    [
        b"",
        _control(b"\x81\xa1x" + b"\x91" * 200_000 + b"\xc0"),
        _control(b"\x81\xa1x" + b"\x81\xa1x" * 200_000 + b"\xc0"),
        _control(b"\x81\xa1x\xdd\xff\xff\xff\xff"),
        _control(b"\xdf\xff\xff\xff\xff"),
        _control(b"\x81\xa1x\xc6\xff\xff\xff\xff"),
        _control(b"\x81\xa1x\xd7\xff" + b"\xff" * 8),
        _control(b"\x81\xa1x\xa2\xff\xfe"),
        _control(b"\x80") + b"\xc0",
        b"\x81\xa4type\xa5other",
        b"\x81\xa4type\xa4step",
    ],
    ids=[
        "nothing",
        "nested lists",
        "nested maps",
        "a list of 2^32",
        "a map of 2^32",
        "bytes of 2^32",
        "a time out of range",
        "not UTF-8",
        "something after the end",
        "another tag",
        "a tag of the other direction",
    ],
)
def test_bombs_are_refused(data: bytes) -> None:
    assert _decode_or_refuse(scheduler_codec(), data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused(protocol: int, tmp_path: Any) -> None:
    target = tmp_path / "written by a pickle"

    class Payload:
        def __reduce__(self) -> Any:
            return (target.write_text, ("x",))

    bad = pickle.dumps(Payload(), protocol)
    for codec in (scheduler_codec(), intake_codec()):
        assert _decode_or_refuse(codec, bad)
        # in a field of any type it stays bytes
        args = msgspec.msgpack.encode({"x": bad})
        inside = scheduler_codec().decode(_control(args))
        assert inside.args == {"x": bad}
    assert not target.exists()


def test_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 1000)
    codec = intake_codec()
    with pytest.raises(InvariantError, match="limit 1000"):
        codec.decode(codec.encode(Failed("x", "y" * 1000)))
    assert codec.decode(codec.encode(Failed("x", "y" * 100)))


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": b"abc"},
        {"num_emitted": 3},
        {"num_emitted": -1},
        {"rid": ""},
        {"embeds": b"abcde"},
        {"prediction": b"abcde"},
    ],
)
def test_a_request_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    codec = scheduler_codec()
    good = TokenizedRequest("r", pack_ids([1, 2, 3]), SamplingParams(), num_emitted=2)
    raw = msgspec.msgpack.decode(codec.encode(good))
    assert codec.decode(msgspec.msgpack.encode(raw)) == good
    with pytest.raises(InvariantError):
        codec.decode(msgspec.msgpack.encode({**raw, **fields}))
