"""The table of hostile requests. Each must be refused quickly, by the name of its fault, at no
lasting cost; or, where it is harmless without what it asks for, be answered without it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

GENERATE, CHAT, COMPLETE = "/generate", "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Attack:
    """`make` returns the body, or chunks to send without a length. `ignored`: the unknown field for
    which the request is answered all the same. `foreign_model`: it names a model that is not here.
    """

    name: str
    path: str
    make: Callable[[], bytes | Iterator[bytes]]
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"
    ignored: str = ""
    foreign_model: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether only --unknown-fields refuse or --strict-model-name refuse it."""
        return bool(self.ignored or self.foreign_model)


ATTACKS: list[Attack] = []


def raw(name: str, path: str, make: Callable[[], Any], **more: Any) -> None:
    ATTACKS.append(Attack(name, path, make, **more))


def native(name: str, *, ignored: str = "", **sampling: Any) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4} | sampling}
    raw(name, GENERATE, lambda: json.dumps(body).encode(), ignored=ignored)


def late(name: str, make: Callable[[], dict[str, Any]]) -> None:
    """Sampling parameters too large to be kept in the table."""
    made = {"text": "a"}
    raw(name, GENERATE, lambda: json.dumps(made | {"sampling_params": make()}).encode())


def chat(name: str, *, foreign_model: str = "", **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4} | fields
    if foreign_model:
        body["model"] = foreign_model
    raw(name, CHAT, lambda: json.dumps(body).encode(), foreign_model=foreign_model)


def part(name: str, kind: str, url: str) -> None:
    chat(name, messages=[{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}])


def doubling(keyword: str, last: Any, depth: int = 60) -> dict[str, Any]:
    """A schema that doubles in size with each of its definitions."""
    defs: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(depth)
    }
    return {"$defs": defs | {f"d{depth}": last}, "$ref": "#/$defs/d0"}


# ---- JSON and bodies ---------------------------------------------------------------------------
raw("nested lists", GENERATE, lambda: b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
raw("nested objects", GENERATE, lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
raw("never closed", GENERATE, lambda: b'{"text": ' + b"[" * 1_000_000)
raw(
    "duplicate keys", GENERATE, lambda: b'{"text": "a", ' + b'"text": 5, ' * 100_000 + b'"text": 5}'
)
raw("lone surrogate", GENERATE, lambda: b'{"text": "\\ud800"}')
raw("malformed UTF-8", GENERATE, lambda: b'{"text": "\xff\xfe\xc3\x28"}')
raw("overlong UTF-8", GENERATE, lambda: b'{"text": "\xc0\xaf"}')
raw("UTF-16", GENERATE, lambda: '{"text": "a"}'.encode("utf-16"))
raw("NaN", GENERATE, lambda: b'{"text": "a", "sampling_params": {"temperature": NaN}}')
raw("Infinity", GENERATE, lambda: b'{"text": "a", "sampling_params": {"top_p": -Infinity}}')
raw("1e400", GENERATE, lambda: b'{"text": "a", "sampling_params": {"temperature": 1e400}}')
raw("a number of 1e6 digits", GENERATE, lambda: b'{"text": "a", "priority": ' + b"9" * 10**6 + b"}")
raw("NUL in an id", GENERATE, lambda: b'{"text": "a", "rid": "a\\u0000b"}')
raw("a list as the body", CHAT, lambda: b"[" + b"{}," * 10_000 + b"{}]")
raw("no JSON at all", CHAT, lambda: b"\x00" * 100_000)
raw("empty", CHAT, lambda: b"")
raw("wrong content type", CHAT, lambda: b"{}", headers={"Content-Type": "text/plain"})
raw("form data", CHAT, lambda: b"a=b", headers={"Content-Type": "multipart/form-data; boundary=x"})
raw("no content type", CHAT, lambda: b"{}", headers={})
raw(
    "gzip bomb",
    CHAT,
    lambda: gzip.compress(b'{"messages": [' + b" " * 20_000_000 + b"]}"),
    headers=JSON | {"Content-Encoding": "gzip"},
)
raw("100 MB unannounced", GENERATE, lambda: (b" " * (1 << 20) for _ in range(100)))
raw("20,000 prompts", GENERATE, lambda: json.dumps({"text": ["a"] * 20_000}).encode())
raw(
    "unknown field",
    GENERATE,
    lambda: b'{"text": "a", "sampling_params": {"max_new_tokens": 4}, "__class__": "x"}',
    ignored="__class__",
)
raw("unknown method", GENERATE, lambda: b"{}", method="DELETE")
raw("unknown path", "/v1/../../etc/passwd", lambda: b"{}")

# ---- numbers and lists -------------------------------------------------------------------------
native("n", n=10**9)
native("top_logprobs of the native kind", ignored="top_logprobs_num", top_logprobs_num=10**9)
raw(
    "top_logprobs_num",
    GENERATE,
    lambda: b'{"text":"a","return_logprob":true,"top_logprobs_num":1e9}',
)
chat("top_logprobs", logprobs=True, top_logprobs=10**9)
chat("n of a chat", n=10**9)
chat("max_tokens", max_tokens=10**18)
chat("negative max_tokens", max_tokens=-1)
native("seed of 70 bits", sampling_seed=2**70)
native("temperature below zero", temperature=-1)
raw("negative token id", GENERATE, lambda: b'{"input_ids": [-1]}')
raw("huge token id", GENERATE, lambda: b'{"input_ids": [18446744073709551617]}')
raw("1e7 token ids", GENERATE, lambda: b'{"input_ids": [' + b"1," * 10_000_000 + b"1]}")
raw("deep token ids", COMPLETE, lambda: b'{"prompt": [[[[1]]]], "max_tokens": 1}')
raw("long prompt", COMPLETE, lambda: json.dumps({"prompt": "ab " * 3_000_000}).encode())
late("giant logit_bias", lambda: {"logit_bias": {str(i): 1.0 for i in range(300_000)}})
late("1e6 stops", lambda: {"stop": ["a"] * 1_000_000})
late("a stop of 10 MB", lambda: {"stop": "a" * 10_000_000})
late("1e6 stop ids", lambda: {"stop_token_ids": [-1] * 1_000_000})
native("stop_regex, nested", stop_regex="(" * 5000 + ")" * 5000)
native("stop_regex, repeated", stop_regex="((((a{1,1000}){1,1000}){1,1000}){1,1000})")
late("1e5 stop_regex", lambda: {"stop_regex": ["a+"] * 100_000})
raw("embeddings of NaN", GENERATE, lambda: b'{"input_embeds": [[NaN, 1.0]]}')
raw("embeddings, ragged", GENERATE, lambda: b'{"input_embeds": [[1.0], [1.0, 2.0]]}')

# ---- grammars ----------------------------------------------------------------------------------
late("schema of 100,000 levels", lambda: {"json_schema": '{"a":' * 100_000 + "1" + "}" * 100_000})
late("enum of 1e5", lambda: {"json_schema": {"enum": [f"v{i}" for i in range(100_000)]}})
late(
    "10,000 properties",
    lambda: {"json_schema": {"properties": {f"p{i}": {} for i in range(10_000)}}},
)
native("schema names itself", json_schema={"$ref": "#"})
native(
    "schemas in a ring",
    json_schema={
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
)
native("schema elsewhere", json_schema={"$ref": "http://127.0.0.1:9/schema.json"})
native("schema in a file", json_schema={"$ref": "file:///etc/passwd"})
native(
    "schema of many factors",
    json_schema={"allOf": [{"type": "integer", "multipleOf": p} for p in (99991, 99989, 99971)]},
)
native("schema is a list", json_schema="[1, 2]")
native("schema with a bomb", json_schema={"type": "string", "pattern": "(?=a)" + "(a*)*" * 10_000})
native("regex, unbalanced", regex="(" * 60_000)
native("regex, nested", regex="(" * 30_000 + ")" * 30_000)
late("regex of 1 MB", lambda: {"regex": "a?" * 500_000})
native("regex with back references", regex=r"(a+)\1{1000}")
native("EBNF without end", ebnf="root ::= a\na ::= b\nb ::= a")
native("EBNF, nested", ebnf="root ::= " + "(" * 15_000 + '"a"' + ")" * 15_000)
native(
    "EBNF, doubling",
    ebnf="root ::= a0\n"
    + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30))
    + '\na30 ::= "x"',
)
late("EBNF of 3,000 rules", lambda: {"ebnf": "root ::= r0\n" + "r ::= r\n" * 3000})
native("two grammars", regex="a", ebnf='root ::= "a"')
late(
    "3,000 tags",
    lambda: {
        "structural_tag": {
            "structures": [{"begin": f"<f{i}>", "schema": {}, "end": "</f>"} for i in range(3000)],
            "triggers": ["<f"],
        }
    },
)
chat("response_format unknown", response_format={"type": "python"})
chat("forced tool unknown", tool_choice={"type": "function", "function": {"name": "rm"}})
late("any object, twice", lambda: {"json_schema": doubling("oneOf", {"$ref": "#/nowhere"})})

# ---- messages and templates --------------------------------------------------------------------
chat("no messages", messages=[])
chat("a role nobody has", messages=[{"role": "root", "content": "a"}])
chat("content is a number", messages=[{"role": "user", "content": 5}])
chat("template in the request", chat_template="{% for i in range(10**9) %}{% endfor %}")
chat("1e5 messages", messages=[{"role": "user", "content": "a"}] * 100_000)
chat("tools without a name", tools=[{"type": "function", "function": {}}] * 1000)
chat(
    "huge tools",
    tools=[
        {"type": "function", "function": {"name": f"f{i}", "description": "x" * 10_000}}
        for i in range(1000)
    ],
)
for _kind in ("image_url", "video_url", "audio_url"):
    part(f"{_kind}, localhost", _kind, "http://localhost:22/")
    part(f"{_kind}, metadata", _kind, "http://169.254.169.254/latest/meta-data/")
    part(f"{_kind}, file", _kind, "file:///etc/passwd")
part("image, path", "image_url", "/etc/passwd")
part("image, disguised address", "image_url", "http://2130706433:22/")
part("image, IPv6", "image_url", "http://[::ffff:127.0.0.1]/")
part("image, no image", "image_url", "data:image/png;base64,AAAA")

# ---- code and paths ----------------------------------------------------------------------------
chat("pickled processor", custom_logit_processor='{"callable": "8004950000"}')
chat("processor by path", custom_logit_processor="os:system")
chat("adapter by path", lora_path="../../etc/passwd")
chat("model by path", foreign_model="../../etc/passwd")
raw("a session of 1e30", "/open_session", lambda: b'{"capacity_of_str_len": -1}')
