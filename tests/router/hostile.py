"""Hostile HTTP: what attackers, broken clients and broken workers send, drawn from a seed."""

from __future__ import annotations

import random
import re

import h11

TARGET = b"/v1/chat/completions"
INNER = b"POST /v1/chat/completions?inner HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

LENGTHS = (
    b"+%d", b" %d", b"%d ", b"0%d", b"%d, %d", b"%d,%d", b"-%d", b"0x%d", b"%d.0", b"%d_0",
    b"%d\x00", b"%d\x0b", b"1%020d", b"", b"%d;a", b"\t%d", b"99999999999", b"%d\r", b"\xb2%d",
)  # fmt: skip
ENCODINGS = (
    b"chunked", b"Chunked", b"chunked, identity", b"identity", b"xchunked", b"chunked ",
    b"\tchunked",
    b"gzip, chunked", b"chunked, chunked", b"chunked\x00", b"chunked;a=b", b"\x0bchunked", b"",
    b"\r\n chunked", b"cow", b"\"chunked\"", b"chunked,", b",chunked", b"chunk\xc3\xa9d",
)  # fmt: skip
NAMES = (
    b"Transfer-Encoding", b"transfer-encoding", b"Transfer-Encoding ", b"Transfer_Encoding",
    b" Transfer-Encoding", b"Transfer-Encoding\x0b", b"\x00Transfer-Encoding",
    b"Transfer-Enc\noding",
    b"X: y\nTransfer-Encoding", b"X: y\rTransfer-Encoding", b"Content-Length ", b"Content-Length\t",
)  # fmt: skip
HEADERS = (
    b"Host: y\r\n", b"Host:\r\n", b"no colon\r\n", b": empty\r\n", b"a(b): c\r\n", b"a: \x00\r\n",
    b"a: b\rc\r\n", b"a: b\n", b"a: b\n\r\n", b" folded: a\r\n", b"a: b\r\n folded\r\n",
    b"a: \xff\r\n",
    b"Connection: close\r\n", b"Connection: content-length\r\n", b"Connection: host, x-n\r\n",
    b"Expect: 100-continue\r\n", b"Expect: 200-ok\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"TE: trailers\r\n", b"Trailer: Host\r\n",
    b"Content-Encoding: gzip\r\n", b"x-request-id: a\tb\r\n", b"x-request-id: \xe9\r\n",
    b"x-radixlm-journal: 1\r\n", b"x-request-id:\r\n", b"Keep-Alive: 0\r\n",
    b"Proxy-Connection: close\r\n",
    b"x-http-method-override: DELETE\r\n", b"Content-Length: 3\r\n", b"a" * 70000 + b": b\r\n",
    b"a: " + b"b" * 70000 + b"\r\n", b"a: b\r\n" * 300, b"Forwarded: for=\"\r\n",
)  # fmt: skip
LINES = (
    b"POST %b HTTP/1.0\r\n", b"POST %b HTTP/1.2\r\n", b"POST %b HTTP/2.0\r\n",
    b"POST %b HTTP/0.9\r\n",
    b"POST %b\r\n", b"POST  %b HTTP/1.1\r\n", b"POST\t%b\tHTTP/1.1\r\n", b"post %b HTTP/1.1\r\n",
    b"POST %b HTTP/1.1\n", b"POST %b http/1.1\r\n", b"POST %b HTTP/1.1 \r\n",
    b"\r\n\r\nPOST %b HTTP/1.1\r\n",
    b"CONNECT %b HTTP/1.1\r\n", b"GET %b HTTP/1.1\r\n", b"HEAD %b HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"POST http://y%b HTTP/1.1\r\n", b"POST http://y:99999%b HTTP/1.1\r\n",
    b"POST //%b HTTP/1.1\r\n",
    b"POST %b#f HTTP/1.1\r\n", b"POST %b\x00 HTTP/1.1\r\n", b"POST %b\xc3\xa9 HTTP/1.1\r\n",
    b"POST %b%%0d%%0aX:y HTTP/1.1\r\n", b"POST /../..%b HTTP/1.1\r\n",
    b"POST %b?" + b"a" * 70000 + b" HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PO ST %b HTTP/1.1\r\n",
    b"POST http://[::1%b HTTP/1.1\r\n",
)  # fmt: skip
CHUNKS = (
    b"%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n", b"%x;a=\"\r\n\"\r\n%b\r\n", b"%x \r\n%b\r\n",
    b"0x%x\r\n%b\r\n",
    b"-%x\r\n%b\r\n", b"+%x\r\n%b\r\n", b"%x\n%b\n", b"%x\r%b\r", b"%x\r\n%b", b"%x\r\n%bXX\r\n",
    b"1%016x\r\n%b\r\n",
    b"00000000%x\r\n%b\r\n", b"%x;\n%b\r\n", b"%x\r\n%b\n", b" %x\r\n%b\r\n",
    b"%x;a\r\nb\r\n%b\r\n", b"%X\r\n%b\r\n",
)  # fmt: skip
ENDS = (
    b"0\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n",
    b"0\r\nHost: z\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"0;x\r\n\r\n", b"00\r\n\r\n", b"0\r\n", b"0\n\n", b"0\r\n\n", b"0\r\nbad trailer\r\n\r\n",
    b"", b"0\r\n \r\n\r\n",
)  # fmt: skip


def request(draw: random.Random, number: int) -> bytes:
    """One request, mostly with one thing wrong. ``number`` names it in its target."""
    body = draw.choice((b'{"n":%d}' % number, b"", INNER, b"{}" + INNER, b"\r\n\r\n", b"0\r\n\r\n"))
    line, headers, kind = b"POST %b HTTP/1.1\r\n", [b"Host: x\r\n"], draw.randrange(9)
    if kind == 0:
        line = draw.choice(LINES)
    if kind == 1:
        headers.insert(draw.randrange(2), draw.choice(HEADERS))
    length = b"Content-Length: %d\r\n" % len(body)
    if kind == 2:
        pattern = draw.choice(LENGTHS)
        value = pattern % ((len(body),) * pattern.count(b"d")) if b"%" in pattern else pattern
        length = draw.choice((b"", length)) + b"Content-Length: " + value + b"\r\n"
    if kind in (3, 4):
        name = draw.choice(NAMES) if draw.random() < 0.3 else b"Transfer-Encoding"
        encoding = draw.choice(ENCODINGS) if draw.random() < 0.6 else b"chunked"
        both = draw.choice((b"", b"", length))
        lines = [name + b": " + encoding + b"\r\n", both]
        draw.shuffle(lines)
        length = b"".join(lines)
    if kind in (3, 4, 5):
        if kind == 5:
            length = b"Transfer-Encoding: chunked\r\n"
        pattern = draw.choice(CHUNKS) if draw.random() < 0.6 else CHUNKS[0]
        body = (pattern % (len(body), body) if body else b"") + draw.choice(ENDS)
    headers.insert(draw.randrange(len(headers) + 1), length)
    target = TARGET + b"?n=%d" % number
    start = line % target if b"%b" in line else line
    return start + b"".join(headers) + b"\r\n" + body


def garbled(draw: random.Random, data: bytes) -> bytes:
    """``data`` with some bytes changed, dropped, doubled or put in."""
    out = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at, what = draw.randrange(len(out)), draw.randrange(5)
        if what == 0:
            out[at] = draw.randrange(256)
        elif what == 1:
            del out[at : at + draw.randrange(1, 9)]
        elif what == 2:
            out[at:at] = draw.choice((b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b"0"))
        elif what == 3:
            out[at:at] = out[at : at + draw.randrange(1, 40)]
        else:
            del out[draw.randrange(len(out) // 2, len(out)) :]
        out = out or bytearray(b"\r\n")
    return bytes(out)


def conversation(seed: int) -> bytes:
    """All that one hostile client sends: up to four requests, the last of them honest."""
    draw = random.Random(seed)
    parts = [request(draw, number) for number in range(draw.randrange(1, 4))]
    if draw.random() < 0.3:
        at = draw.randrange(len(parts))
        parts[at] = garbled(draw, parts[at])
    last = b"POST %b?last HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    return b"".join([*parts, last % TARGET])


def readings(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Method, target and body of the requests in ``data``, as h11 reads them until an error. Empty
    lines before a request and more than one space after its method may be read over."""
    found: list[tuple[bytes, bytes, bytes]] = []
    while data:
        server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        server.receive_data(re.sub(rb"^[\r\n]*([A-Z]+) +", rb"\1 ", data))
        one = _read_one(server)
        if one is None:
            break
        found.append(one)
        data = server.trailing_data[0] if server.our_state is h11.DONE else b""
    return found


def _read_one(server: h11.Connection) -> tuple[bytes, bytes, bytes] | None:
    head, body = None, b""
    while True:
        try:
            event = server.next_event()
        except h11.RemoteProtocolError:
            return None
        if isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None and head.method != b"CONNECT":
            server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            server.send(h11.EndOfMessage())
            return head.method, head.target, body
        else:
            return None


def path_of(target: bytes) -> bytes:
    """A target without the host of a whole URL, and without a fragment or an empty query."""
    if not target.startswith(b"/"):
        target = b"/" + target.partition(b"//")[2].partition(b"/")[2]
    return target.partition(b"#")[0].removesuffix(b"?")


_STRICT = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#-'*+.^-z|~A-Z0-9-]+: [^\r\n\0]*\r\n)+)\r\n"
)


def split_strictly(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Target and body of each request on a connection to a worker; AssertionError where it could be
    read in two ways."""
    found, at = [], 0
    while at < len(raw):
        match = _STRICT.match(raw, at)
        assert match, raw[at : at + 200]
        lines = match[2].lower().split(b"\r\n")
        lengths = [line[16:] for line in lines if line.startswith(b"content-length: ")]
        assert len(lengths) == 1 and lengths[0].isdigit(), lines
        assert not any(line.startswith(b"transfer-encoding:") for line in lines)
        assert sum(line.startswith(b"host: ") for line in lines) == 1, lines
        end = match.end() + int(lengths[0])
        assert end <= len(raw)
        found.append((match[1], raw[match.end() : end]))
        at = end
    return found


def split_answers(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer to a client; AssertionError where bytes are left over."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        end = data.find(b"\r\n\r\n", at) + 4
        head = data[at:end].lower()
        match = re.match(rb"http/1\.1 (\d{3}) [^\r\n]*\r\n", head)
        assert match and end > 3, data[at : at + 200]
        if match[1] == b"100":
            at = end
            continue
        length = re.findall(rb"\r\ncontent-length: (\d+)\r\n", head)
        assert len(length) == 1, head
        is_head = data.startswith(b"HTTP/1.1 ", end)
        at = end if is_head else end + int(length[0])
        found.append((int(match[1]), data[end:at]))
        assert at <= len(data), "an answer is cut"
    return found
