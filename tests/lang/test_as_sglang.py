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
