"""The gateway's journal of a stream: bytes in, whole blocks out, records kept."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from radixlm.router.call import Call
from radixlm.router.journal import HEADER, MAX_KILLS, Journal, JournalMemory, client_resume
from radixlm.router.worker import Worker

BODY = b'{"model": "m", "stream": true}'


def worker(digest: str | None = "d1") -> Worker:
    made = Worker("http://127.0.0.1:1")
    if digest is not None:
        made.facts["resume_digest"] = digest
    return made


def call(path: str = "/v1/chat/completions", body: bytes = BODY, headers: Any = ()) -> Call:
    return Call("POST", path, "", list(headers), body)


def resumed(journal: Journal) -> Any:
    """The field as the next worker reads it."""
    return orjson.loads(call().overridden(journal.resume_fields())).get("resume")


record = st.text("abcXYZ019+/=", min_size=1, max_size=30)
# JSON holds no raw line end; a text may look like a line of records
data = st.sampled_from(
    ["data: {}", 'data: {"text":": j abc"}', "event: x\ndata: 1", "data: [DONE]"]
)
blocks = st.lists(st.tuples(st.lists(st.lists(record, max_size=3), max_size=2), data), max_size=20)


@given(blocks, st.lists(st.integers(1, 60)), st.integers(0, 400))
def test_any_cut_of_the_bytes_gives_the_same_blocks_and_records(made, sizes, lost_bytes):
    sent, shown, records = b"", [], []
    for lines, text in made:
        for line in lines:
            sent += f": j {' '.join(line)}\n".encode()
            records += line
        sent += text.encode() + b"\n\n"
        shown.append(text.encode() + b"\n\n")
    sent = sent[: max(0, len(sent) - lost_bytes)]
    journal, got, place = Journal(call(), worker()), b"", 0
    for size in [*sizes, len(sent)]:
        got += journal.feed(sent[place : place + size])
        place += size
    journal.lost()
    assert got == b"".join(shown[: journal.num_blocks])
    assert not got or got.endswith(b"\n\n")
    if not lost_bytes:
        assert journal.num_blocks == len(shown)
        assert not shown or resumed(journal)["journal"] == records


def test_a_block_goes_through_as_it_came_and_its_record_is_kept():
    journal = Journal(call(), worker())
    block = b'data: {"a": 1}\n\n'
    assert journal.feed(b": j r1 r2\n" + block) == block
    assert journal.feed(block) is block  # not copied
    assert journal.feed(b": j r3\nda") == b""
    assert journal.feed(b"ta: 2\n\nda") == b"data: 2\n\n"
    journal.lost()
    assert resumed(journal) == {"journal": ["r1", "r2", "r3"], "num_events": 3}
    assert journal.feed(b": j r4\ndata: 3\n\n") == b"data: 3\n\n"  # of the next worker
    assert resumed(journal) == {"journal": ["r1", "r2", "r3", "r4"], "num_events": 4}


def test_what_the_client_itself_resumes_is_kept():
    body = b'{"input_ids": [1, 2], "resume": {"num_emitted": 1}}'
    journal = Journal(call("/generate", body), worker())
    journal.feed(b": j r1\ndata: 1\n\n")
    journal.lost()
    asked = {"num_emitted": 1, "journal": ["r1"], "num_events": 1}
    assert journal.resume_fields() == {"resume": asked}


def test_lines_of_ollama_are_blocks():
    journal = Journal(call("/api/chat"), worker())
    assert journal.feed(b': j r1\n{"a": 1}\n{"b"') == b'{"a": 1}\n'
    assert journal.num_blocks == 1


def test_a_stream_goes_on_only_where_answers_are_the_same():
    journal = Journal(call(), worker())
    assert journal.can_resume(worker("other"))  # nothing was sent
    assert journal.resume_fields() == {}
    journal.feed(b": j r\ndata: 1\n\n")
    assert journal.can_resume(worker())
    assert not journal.can_resume(worker("other"))
    assert not journal.can_resume(worker(None))


def test_a_stream_without_records_cannot_be_moved():
    for facts in ("d1", None):
        journal = Journal(call(), worker(facts))
        journal.feed(b"data: 1\n\n")
        assert not journal.can_resume(worker(facts))


def test_a_request_that_kills_its_workers_is_not_sent_again():
    journal = Journal(call(), worker())
    journal.lost()
    assert journal.can_resume(worker())
    assert resumed(journal) == {"kills": 1}
    for _ in range(MAX_KILLS + 1):  # it goes on each time, so it is not the cause
        journal.feed(b": j r\ndata: 1\n\n")
        journal.lost()
        assert journal.kills == 0
        assert journal.can_resume(worker())
    journal.lost()
    assert resumed(journal)["kills"] == 1
    journal.lost()
    assert not journal.can_resume(worker())


def test_memory_is_bounded_and_given_back():
    memory = JournalMemory(2000)
    first, second = (Journal(call(), worker(), memory) for _ in range(2))
    for _ in range(100):
        assert first.feed(b": j " + b"r" * 99 + b"\ndata: 1\n\n") == b"data: 1\n\n"
        assert memory.used <= memory.limit
    assert first.is_dropped
    assert memory.num_dropped == 1
    assert not first.can_resume(worker())
    assert second.feed(b": j r\ndata: 1\n\n")
    assert second.can_resume(worker())
    for journal in (first, second):
        journal.close()
        journal.close()
    assert memory.used == 0


def test_a_stream_passes_whole_where_the_memory_is_full():
    journal = Journal(call(), worker(), JournalMemory(600))
    record = b": j " + b"r" * 99 + b"\n"
    assert journal.feed(record + b"data: 1\n\n" + b"dat") == b"data: 1\n\n"
    assert journal.is_dropped
    assert journal.feed(b"a: 2\n\n") == b"data: 2\n\n"


def test_a_block_without_an_end_is_not_held(monkeypatch):
    monkeypatch.setattr("radixlm.router.journal.MAX_BLOCK_BYTES", 100)
    memory = JournalMemory()
    journal = Journal(call(), worker(), memory)
    sent = b": j r\n" + b"data: " + b"1" * 500 + b"\n\ndata: 2\n\n"
    got = b"".join(journal.feed(sent[at : at + 60]) for at in range(0, len(sent), 60))
    assert got == sent.removeprefix(b": j r\n")
    assert journal.is_dropped and not journal.can_resume(worker()) and memory.used == 0


def test_a_gateway_before_a_gateway_keeps_its_own_journal():
    body = b'{"model": "m", "resume": {"journal": ["r0"], "num_events": 5}}'
    journal = Journal(call(body=body, headers=[HEADER]), worker())
    block = b": j r1\ndata: 1\n\n"
    assert journal.feed(block) == block
    journal.lost()
    fields = orjson.loads(call(body=body).overridden(journal.resume_fields()))
    assert fields["resume"] == {"journal": ["r0", "r1"], "num_events": 6}


def test_a_client_cannot_put_itself_first_by_the_gateways_key():
    for name in (b"kills", b"k\\u0069lls"):
        body = b'{"stream": true, "resume": {"journal": ["h"], "num_events": 1, "%s": 1}}' % name
        asked, keyed = call(body=body), Worker("http://127.0.0.1:1", api_key="k")
        assert client_resume(asked, worker()) is None
        assert client_resume(asked, keyed) == {"journal": ["h"], "num_events": 1}
        assert "kills" not in Journal(asked, keyed).resume_fields()["resume"]
        asked.is_admin = True
        assert client_resume(asked, keyed) is None
