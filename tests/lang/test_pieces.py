"""Templates, choices, traces, and the HTTP client of programs."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from tests.lang.backends import LIMIT_S, Echo

import radixlm as sgl
from radixlm.lang.backend.generate_api import _from_boundary
from radixlm.lang.backend.runtime_endpoint import _flags
from radixlm.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
)
from radixlm.lang.http import HttpClient
from radixlm.lang.ir import SglConstantText, SglGen
from radixlm.lang.model_template import ModelTemplate, template_of
from radixlm.lang.tracer import trace_prefix
from radixlm.text.chat import ChatTemplate as Rendered

_POPEN = subprocess.Popen
TALK = [
    {"role": "system", "content": None},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "What can you do?"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("default", "USER:Hello!\nASSISTANT:Hi!\nUSER:What can you do?\n"),
        (
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello!"
            "<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nWhat can you do?"
            "<|im_end|>\n",
        ),
        ("mistral", "[INST] Hello! [/INST]Hi! </s><s>[INST] What can you do? [/INST]"),
    ],
)
def test_prompts_of_templates(name: str, text: str) -> None:
    assert get_chat_template(name).get_prompt(TALK) == text


def test_the_first_user_of_llama_2_is_joined_with_the_system_text() -> None:
    talk = [{"role": "system", "content": "S"}, *TALK[1:3]]
    prompt = get_chat_template("llama-2-chat").get_prompt(talk)
    assert prompt == "[INST] <<SYS>>\nS\n<</SYS>>\n\nHello! [/INST]Hi! </s><s>"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-instruct"),
        ("Qwen/Qwen2.5-VL-7B", "qwen2-vl"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("Qwen/Qwen3-8B", "default"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-Base", "default"),
        ("google/gemma-3-4b-it", "gemma-it"),
        ("THUDM/glm-4.1v-9b", "glm-4v"),
        ("TinyLlama/TinyLlama-1.1B", "chatml"),
    ],
)
def test_the_template_of_a_path(path: str, name: str) -> None:
    assert get_chat_template_by_model_path(path).name == name


def test_own_templates_and_unknown_names() -> None:
    own = ChatTemplate("own", None, {"user": ("U:", ";")})
    register_chat_template(own)
    assert get_chat_template("own") is own
    with pytest.raises(KeyError, match="no chat template 'nope'; there are"):
        get_chat_template("nope")


def _decide(method: Any, inputs: list[list[list[Any]]], alone: Any = None) -> Any:
    means = [sum(token[0] for token in tokens) / len(tokens) for tokens in inputs]
    return method(
        choices=["Paris", "Antarctica", "Rome"][: len(inputs)],
        normalized_prompt_logprobs=means,
        input_token_logprobs=inputs,
        output_token_logprobs=[],
        unconditional_token_logprobs=alone,
    )


def test_methods_of_choosing() -> None:
    inputs = [[[-3.0, 1, "a"], [-1.0, 2, "b"]], [[-1.0, 3, "c"], [-4.0, 4, "d"], [-1.0, 5, "e"]]]
    assert _decide(sgl.token_length_normalized, inputs).decision == "Paris"
    greedy = _decide(sgl.greedy_token_selection, inputs)
    assert greedy.decision == "Antarctica"
    assert greedy.meta_info["greedy_logprob_matrix"] == [[-3.0, -1.0, -2.0], [-1.0, -4.0, -1.0]]
    alone = [[[None, 1, "a"], [-5.0, 2, "b"]], [[None, 3, "c"], [-1.0, 4, "d"], [-1.0, 5, "e"]]]
    better = _decide(sgl.unconditional_likelihood_normalized, inputs, alone)
    assert better.decision == "Paris"
    assert better.meta_info["normalized_unconditional_prompt_logprobs"] == [0.5, -4 / 3]
    with pytest.raises(ValueError, match="are needed by this method"):
        _decide(sgl.unconditional_likelihood_normalized, inputs)


def test_equal_beginnings_are_decided_by_what_follows() -> None:
    inputs = [[[-1.0, 1, "a"], [-2.0, 2, "b"]], [[-1.0, 1, "a"], [-1.0, 3, "c"]]]
    assert _decide(sgl.greedy_token_selection, inputs).decision == "Antarctica"


def test_traces_are_graphs() -> None:
    @sgl.function
    def child(s: Any, topic: str) -> None:
        s += "About " + topic + ":" + sgl.gen("facts")

    @sgl.function
    def parent(s: Any, topic: str) -> None:
        s += "Head\n"
        inner = child(topic=topic)
        s += inner["facts"]
        group = s.fork(2)
        group += sgl.gen("x")

    tracer = parent.trace(backend=Echo(), topic="cats")
    assert [type(node).__name__ for node in tracer.flatten_nodes()] == [
        "SglConstantText",
        "SglVariable",
    ]
    assert len(tracer.child_states) == 3
    graph = tracer.child_states[1].last_node.print_graph_dfs()
    assert "Fork(" in graph and "GetForkItem(" in graph and "Constant('Head\\n')" in graph
    assert graph.index("Constant('Head") < graph.index("Fork(")
    kinds = [type(node) for node in tracer.child_states[0].nodes]
    assert kinds == [SglConstantText, SglGen]


def test_the_prefix_of_all_runs() -> None:
    calls: list[Any] = []

    @sgl.function
    def program(s: Any, question: str) -> None:
        calls.append(question)
        s += sgl.system("Always the same.") + sgl.user("Q: " + question)

    assert trace_prefix(program, Echo()) == "SYSTEM:Always the same.\nUSER:Q: "
    assert len(calls) == 1

    class Caches(Echo):
        prefixes: ClassVar[list[str]] = []

        def cache_prefix(self, prefix_str: str) -> None:
            self.prefixes.append(prefix_str)

    program.cache(Caches())
    long = sgl.function(lambda s, x: s.__iadd__("y" * 80 + x))
    long.cache(Caches())
    assert Caches.prefixes == ["y" * 80]


class _Handler(BaseHTTPRequestHandler):
    """Closes each connection after two requests, as servers do that stand idle."""

    protocol_version = "HTTP/1.1"
    served = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.served += 1
        if body.get("fail"):
            self._answer(400, b'{"error": "wrong"}')
        elif body.get("stream"):
            events = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for event in events[: body.get("events", 3)]:
                self.wfile.write(event)
            self.close_connection = True
        else:
            self._answer(200, json.dumps({"body": body, "key": self.headers["Authorization"]}))

    def _answer(self, status: int, data: bytes | str) -> None:
        encoded = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        if self.served == 2:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_connections_are_kept_and_replaced(url: str) -> None:
    client = HttpClient(url, "key")
    for number in range(7):
        answer = client.request("POST", "/x", {"n": number})
        assert answer == {"body": {"n": number}, "key": "Bearer key"}
    with pytest.raises(RuntimeError, match="wrong"):
        client.request("POST", "/x", {"fail": True})


def test_streams_end_or_say_that_they_did_not(url: str) -> None:
    client = HttpClient(url)
    assert [event["n"] for event in client.events("/x", {"stream": True})] == [1, 2]
    with pytest.raises(RuntimeError, match="closed the connection before the stream's end"):
        list(client.events("/x", {"stream": True, "events": 1}))
    with pytest.raises(RuntimeError, match="wrong"):
        list(client.events("/x", {"fail": True}))
    with pytest.raises(ValueError, match="has the form"):
        HttpClient("127.0.0.1:30000")


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_that_a_server_has_got_is_never_sent_twice(method: str) -> None:
    """The server closes a kept connection instead of an answer."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.settimeout(LIMIT_S)
                got.append(link.recv(1 << 16))
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                got.append(link.recv(1 << 16))
            link, _ = server.accept()
            with link:
                got.append(link.recv(1 << 16))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=LIMIT_S)
        client.request("GET", "/first")
        with pytest.raises(ConnectionError):
            client.request(method, "/second")
        with suppress(ConnectionError):
            client.request("GET", "/third")
        thread.join(LIMIT_S)
    assert [data.split()[1] for data in got] == [b"/first", b"/second", b"/third"]
    client.close()


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)

        def serve() -> None:
            for _ in range(2):
                link, _ = server.accept()
                with link:
                    link.settimeout(LIMIT_S)
                    link.recv(1 << 16)
                    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=serve, daemon=True).start()
        client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=LIMIT_S)
        assert client.request("POST", "/first", {}) == {}
        assert select.select([client._idle[0][1].sock], [], [], LIMIT_S)[0], "not closed"
        assert client.request("POST", "/second", {}) == {}
        client.close()


def test_options_of_a_server_as_arguments() -> None:
    options = {"tp_size": 2, "trust_remote_code": True, "enable_lora": False, "api_key": None}
    more = {"lora_paths": ["a", "b=c"], "json_model_override_args": {"x": 1}}
    assert [*_flags(options | more)] == [
        *("--tp-size=2", "--trust-remote-code", "--no-enable-lora"),
        *("--lora-paths", "a", "b=c", '--json-model-override-args={"x": 1}'),
    ]


def test_a_server_of_ones_own_that_does_not_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        "radixlm.lang.backend.runtime_endpoint.subprocess.Popen",
        lambda command: begun.append(process := _POPEN([sys.executable, "-c", "1"])) or process,
    )
    with pytest.raises(RuntimeError, match="did not start"):
        sgl.Runtime(process=True)
    assert begun[0].poll() is not None


@pytest.mark.parametrize(
    ("pieces", "num_dropped"),
    [(["def ", "yes"], 1), (["f ", "yes"], 1), (["abc", " def", " yes"], 0), ([" y", "es"], 0)],
)
def test_the_tokens_that_count_for_a_choice(pieces: list[str], num_dropped: int) -> None:
    tokens = [[-1.0, number, piece] for number, piece in enumerate(pieces)]
    assert _from_boundary(tokens, "abc def ") == tokens[num_dropped:]


def test_the_models_own_template_stands_around_messages() -> None:
    """Against renderings of whole conversations, for a template that keeps what it wrote."""
    source = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text or '<img>' }}{% endfor %}"
        "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rendered = Rendered(source, {"bos_token": "<s>"})
    for bos in ("", "<s>"):
        template = ModelTemplate(rendered, bos)
        assert (template.stop_str, template.image_token) == (("<|end|>",), "<img>")
        messages = [
            {"role": role, "content": f"{role} {n}"}
            for n, role in enumerate(("system", "user", "assistant", "user"))
        ]
        text = template.get_prompt(messages)
        opened = text + template.get_prefix_and_suffix("assistant", messages)[0]
        assert bos + text == rendered.render(messages, add_generation_prompt=False)
        assert bos + opened == rendered.render(messages)


def test_a_template_without_a_place_for_the_system_goes_by_the_path() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="no place for a message of 'system'"):
        ModelTemplate(Rendered(source))
    found = template_of("Qwen2-7B-Instruct", None, lambda: (Rendered(source), ""))
    assert found.name == "qwen" and template_of("x", "chatml", lambda: None).name == "chatml"
