"""Programs over models: parts that run side by side, and a choice, on a running server."""

import os

import radixlm as sgl

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
sgl.set_default_backend(sgl.RuntimeEndpoint(url))


@sgl.function
def question(s, text):
    """One answer."""
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16))


states = question.run_batch(
    [{"text": f"What is {n} + 10?"} for n in (1, 2, 3)], temperature=0, num_threads=3
)
print([state["answer"] for state in states])
assert [state["answer"] for state in states] == ["11", "12", "13"]


@sgl.function
def judged(s, a, b):
    """Two branches that share their beginning, then a choice."""
    s += sgl.system("You are a helpful assistant.")
    branches = s.fork(2)
    for branch, text in zip(branches, (a, b), strict=True):
        branch += sgl.user(f"What is {text}?")
        branch += sgl.assistant(sgl.gen("sum", max_tokens=8))
    s += sgl.user(f"Which is larger, {branches[0]['sum']} or {branches[1]['sum']}?")
    s += sgl.assistant(sgl.select("larger", choices=[one["sum"] for one in branches]))


state = judged.run("3 + 4", "20 + 30", temperature=0)
print(state["larger"])
assert state["larger"] in ("7", "50")
