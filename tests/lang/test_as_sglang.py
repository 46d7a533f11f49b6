"""The sibling package that gives programs the name sglang."""

import subprocess
import sys
from pathlib import Path

COMPAT = Path(__file__).parents[2] / "compat" / "sglang" / "src"
PROGRAM = """
import asyncio
import sglang as sgl
import sglang.lang.interpreter
from sglang.global_config import global_config
from sglang import OpenAI, function, gen, set_default_backend
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.ir import SglGen
from sglang.test.test_utils import CustomTestCase, select_sglang_backend
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import Function, Tool
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.server_args import ServerArgs
from sglang.test.doc_patch import launch_server_cmd
from sglang.utils import LazyImport, dump_state_text, encode_image_base64, http_request, read_jsonl
from sglang.utils import async_stream_and_merge, stream_and_merge
import radixlm
import radixlm.lang.ir

class Echo(BaseBackend):
    is_immediate = True
    def generate(self, s, sampling_params):
        return f"[{len(s.text_)}]", {}

@sgl.function
def program(s, q):
    s += sgl.user(q) + sgl.assistant(gen("a"))

assert SglGen is radixlm.lang.ir.SglGen and sgl.function is radixlm.function
assert ServerArgs is radixlm.ServerArgs and Engine is radixlm.Engine
assert sgl.global_config is global_config is radixlm.global_config
assert radixlm.lang.ir.__spec__.name == "radixlm.lang.ir"
state = program.run(q="x", backend=Echo())
assert state["a"] == "[17]", state["a"]
dump_state_text("out.txt", [state, "text"])
open("lines.jsonl", "w").write('# a comment\\n{"a": 1}\\n')
assert list(read_jsonl("lines.jsonl")) == [{"a": 1}] and "text" in open("out.txt").read()
assert LazyImport("json", "JSONDecoder")().decode("1") == 1
assert ReasoningParser("Qwen3").parse_non_stream("<think>a</think>b") == ("a", "b")
parser = ReasoningParser("deepseek-r1")
assert [parser.parse_stream_chunk(t) for t in ("ab", "</think>c")] == [("ab", ""), ("", "c")]
assert parser.parse_stream_end() == ("", "")
tools = [Tool(function=Function(name="f", parameters={"type": "object"}))]
parser = FunctionCallParser(tools=tools, tool_call_parser="qwen25")
call = '<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>'
text, (found,) = parser.parse_non_stream("a" + call)
assert (text, found.name, found.parameters) == ("a", "f", '{"x": 1}')
assert parser.has_tool_call(call) and not parser.has_tool_call("a")
assert parser.parse_stream_chunk("a")[0] == "a"

class Words:
    def generate(self, prompt, sampling_params, stream):
        return iter([{"text": "a"}, {"text": "ab"}])
    async def async_generate(self, prompt, sampling_params, stream):
        async def chunks():
            yield {"text": "a"}
            yield {"text": "ab"}
        return chunks()

async def read():
    return [text async for text in async_stream_and_merge(Words(), "q", {})]

assert stream_and_merge(Words(), "q", {}) == "ab" and asyncio.run(read()) == ["a", "b"]
try:
    import sglang.lang.nothing
except ModuleNotFoundError:
    print("done")
"""


def test_programs_that_import_sglang_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{COMPAT}:{COMPAT.parents[2] / 'src'}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "done\n", done.stderr


def test_its_programs_are_ours(tmp_path: Path) -> None:
    names = """import importlib.util, runpy, sys
import sglang
for name in sys.argv[1].split():
    assert importlib.util.find_spec(f"sglang.{name}").origin.endswith(f"radixlm/{name}.py"), name
sys.argv[1:] = ["--help"]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)"""
    done = subprocess.run(
        [sys.executable, "-c", names, "bench_serving bench_one_batch check_env profiler"],
        env={"PYTHONPATH": f"{COMPAT}:{COMPAT.parents[2] / 'src'}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "--model-path" in done.stdout, done.stderr


HELPERS = """
import asyncio, base64, os, subprocess, sys
from argparse import Namespace
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.environ import envs
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import get_open_port, kill_process_tree, random_uuid
from sglang.srt.utils.common import get_bool_env_var
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test.few_shot_gsm8k import run_eval as run_gsm8k
from sglang.test.run_eval import run_eval
from sglang.test.test_utils import (
    DEFAULT_MODEL_NAME_FOR_TEST, DEFAULT_SMALL_MODEL_NAME_FOR_TEST, call_generate_srt_raw,
    get_call_generate, popen_launch_server, send_concurrent_generate_requests,
    send_generate_requests,
)
from sglang.utils import normalize_base_url, wait_for_server


from PIL import Image
from sglang.srt.parser.conversation import chat_templates
from sglang.srt.utils import load_image

image, size = Image.new("RGB", (3, 2)), (3, 2)
image.save("small.png")
data = open("small.png", "rb").read()
text = base64.b64encode(data).decode()
uri = "data:image/png;base64," + text
for source in ("small.png", os.path.abspath("small.png"), data, text, uri):
    assert load_image(source)[0].size == size
assert load_image(image)[0] is image
assert "<|image_pad|>" in chat_templates["qwen2-vl"].copy().image_token

class Mine(CustomLogitProcessor):
    pass

def refused(error, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except error as caught:
        return str(caught)
    raise AssertionError("it was taken")

assert DEFAULT_MODEL_NAME_FOR_TEST == DEFAULT_SMALL_MODEL_NAME_FOR_TEST
assert DisallowedTokensLogitsProcessor().to_str() == "disallowed_tokens"
assert "--logit-processor NAME=__main__:Mine" in refused(TypeError, Mine.to_str)
args = prepare_server_args(["--model-path", "x", "--tp-size", "2"])
assert args.tp_size == 2 and args.given() == {"model_path": "x", "tp_size": 2}
with envs.SGLANG_IS_IN_CI.override(True):
    assert get_bool_env_var("SGLANG_IS_IN_CI") is False or os.environ["SGLANG_IS_IN_CI"] == "True"
    assert get_bool_env_var("SGLANG_IS_IN_CI")
assert not envs.SGLANG_IS_IN_CI.is_set() and len(random_uuid()) == 32

child = "import subprocess, sys; p = subprocess.Popen(['/bin/cat'], stdin=subprocess.PIPE); " \\
    "print(p.pid, flush=True); p.wait()"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
below = int(process.stdout.readline())
kill_process_tree(process.pid, wait_timeout=10)
assert process.wait() == -9
kill_process_tree(below)  # nothing is left
ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
assert "exit code 3" in refused(RuntimeError, wait_for_server, "http://127.0.0.1:9", process=ended)

port = get_open_port()
url = normalize_base_url("127.0.0.1", port)
process = popen_launch_server(DEFAULT_MODEL_NAME_FOR_TEST, url, 60, api_key="key",
    other_args=["--cpu-threads", 1, "--max-total-tokens", 4096])
kill_process_tree(process.pid, wait_timeout=10)
process = popen_launch_server(DEFAULT_MODEL_NAME_FOR_TEST, url, 60,
    other_args=["--cpu-threads", 1, "--max-total-tokens", 4096])
try:
    wait_for_server(url, timeout=10, process=process)
    text = call_generate_srt_raw("The capital of France is", 0, 4, url=f"{url}/generate")
    call = get_call_generate(Namespace(backend="srt-raw", host="127.0.0.1", port=port))
    assert text and call("The capital of France is", 0, 4) == text
    assert send_generate_requests(url, 2) == [200, 200]
    assert asyncio.run(send_concurrent_generate_requests(url, 3)) == [200, 200, 200]
    found = run_eval(Namespace(eval_name="bundled", base_url=url, num_examples=4, num_threads=2))
    assert 0 <= found["score"] == found["accuracy"] <= 1 and found["num_items"] == 4
    lines = '{"question": "What is 1 + 2?", "answer": "#### 3"}\\n' * 3
    open("gsm8k.jsonl", "w").write(lines)
    found = run_gsm8k(Namespace(port=port, data_path="gsm8k.jsonl", num_shots=1, parallel=2))
    assert {"accuracy", "invalid", "latency", "output_throughput"} <= found.keys()
    tokenizer = get_tokenizer(DEFAULT_MODEL_NAME_FOR_TEST)
    assert tokenizer.decode(tokenizer.encode("one two")) == "one two"
finally:
    kill_process_tree(process.pid, wait_timeout=10)
print("done")
"""


def test_helpers_of_tests_start_and_ask_a_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELPERS],
        env={"PYTHONPATH": f"{COMPAT}:{COMPAT.parents[2] / 'src'}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
