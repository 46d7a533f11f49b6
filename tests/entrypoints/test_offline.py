"""radixlm.Engine: what its calls do once it is shut down."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import radixlm
from radixlm.base.errors import EngineError, InvalidRequest
from radixlm.entrypoints.answers import Generation, MetaInfo
from radixlm.entrypoints.offline_control import EngineTokenizerManager
from radixlm.weights.size import stored_bytes

SHUT = "this engine was shut down: make a new radixlm.Engine"
ARGUMENTS = {  # of calls that need some
    "generate": ("x",),
    "chat": ("x",),
    "encode": ("x",),
    "submit": ({"text": "x"},),
    "score": ("q", ["a"], [1]),
    "rerank": ([["q", "a"]],),
    "get_weights_by_name": ("x",),
    "load_lora_adapter": ("a", "folder"),
    "load_lora_adapter_from_tensors": ("a", {}, {}),
    "unload_lora_adapter": ("a",),
    "close_session": ("a",),
    "save_sharded_model": ("folder",),
    "update_weights_from_disk": ("folder",),
    "update_weights_from_tensor": ([],),
    "init_weights_update_group": ("127.0.0.1", 1, 1, 2),
    "update_weights_from_distributed": ([], [], []),
}
LONG = {"max_new_tokens": 4000, "ignore_eos": True}


def weights(**options: object) -> float:
    with radixlm.Engine(**options) as engine:
        state = engine.get_server_info()
    assert state["internal_states"][0]["memory_usage"]["weight"] == round(
        state["weight_bytes"] / 2**30, 3
    )
    memory = state["internal_states"][0]["memory_usage"]
    assert 0 <= memory["kvcache_resident_bytes"] <= state["kv_bytes"]
    return float(state["weight_bytes"])


def test_calls_after_shutdown_say_so() -> None:
    engine = radixlm.Engine()
    engine.shutdown()
    engine.shutdown()
    calls = {name: getattr(engine, name) for name in dir(engine) if not name.startswith("_")}
    without_engine = ("shutdown", "get_all_child_pids")
    calls = {n: call for n, call in calls.items() if callable(call) and n not in without_engine}
    assert len(calls) > 25 and ARGUMENTS.keys() < calls.keys()
    for name, call in calls.items():
        arguments = ARGUMENTS.get(name.removeprefix("async_"), ())
        is_async = inspect.iscoroutinefunction(call)
        for more in ({}, {"stream": True}) if name in ("generate", "chat") else ({},):
            with pytest.raises(EngineError, match=SHUT):
                answer = asyncio.run(call(*arguments)) if is_async else call(*arguments, **more)
                list(answer if more else ())


GREEDY = {"max_new_tokens": 4, "temperature": 0.0}


def test_the_engine_says_which_model_it_serves() -> None:
    with radixlm.Engine(served_model_name="mine", reasoning_parser="qwen3") as engine:
        before = engine.get_model_info()
        folder = str(engine.info.folder)
        engine.update_weights_from_disk(folder, weight_version="v2")
        after = engine.get_model_info()
    assert before["served_model_name"] == "mine" and before["is_generation"]
    assert (before["reasoning_parser"], before["disaggregation_mode"]) == ("qwen3", "null")
    assert before["weight_version"] != after["weight_version"] == "v2"
    assert after["model_path"] == folder


def test_a_session_goes_on_from_its_requests() -> None:
    with radixlm.Engine(random_seed=1) as engine:
        name = engine.open_session(100)
        params: dict[str, str] = {"id": name}
        first = engine.generate(
            "The sky", GREEDY, session_params=params, return_prompt_token_ids=True
        )
        params["rid"] = first["meta_info"]["id"]
        second = engine.generate(" is", GREEDY, session_params=params, return_prompt_token_ids=True)
        before = first["prompt_token_ids"] + first["output_ids"]
        assert second["prompt_token_ids"][: len(before)] == before
        engine.close_session(name)
        with pytest.raises(InvalidRequest, match="no session"):
            engine.generate("x", GREEDY, session_params=params)


def test_the_tokenizer_manager_has_what_programs_for_sglang_read() -> None:
    # long enough for a reader on a busy machine to see several parts
    greedy = {**GREEDY, "max_new_tokens": 200, "ignore_eos": True}

    async def answers(manager: EngineTokenizerManager) -> list[str]:
        one = SimpleNamespace(text="The sky", sampling_params=greedy, rid=None)
        many = {"text": "The sky", "sampling_params": greedy, "stream": True}
        texts = [[got["text"] async for got in manager.generate_request(x)] for x in (one, many)]
        assert (await manager.flush_cache()).success
        assert len(texts[0]) == 1 < len(texts[1])
        return [parts[-1] for parts in texts]

    with radixlm.Engine(random_seed=1, num_continuous_decode_steps=1) as engine:
        manager = engine.tokenizer_manager
        ids = manager.tokenizer.encode("The sky")
        assert ids == engine.tokenizer.encode("The sky")
        chat = [{"role": "user", "content": "hi"}]
        assert "hi" in manager.tokenizer.apply_chat_template(chat, tokenize=False)
        model = manager.model_config
        assert model.context_len == manager.context_len == engine.info.context_len
        assert model.vocab_size == model.hf_config.vocab_size and model.is_generation
        assert manager.server_args.random_seed == engine.server_args.random_seed == 1
        first, second = asyncio.run(answers(manager))
        assert first == second == engine.generate("The sky", greedy)["text"]


def test_chat_is_generate_of_the_rendered_conversation() -> None:
    greedy = {"max_tokens": 8, "temperature": 0.0}
    with radixlm.Engine(random_seed=1) as engine:
        messages = [{"role": "user", "content": "What is 17 + 25?"}]
        answer = engine.chat(messages, return_prompt_token_ids=True, **greedy)
        ids = answer["choices"][0]["prompt_token_ids"]
        plain = engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 8, "temperature": 0.0}
        )
        assert set(plain) == Generation.__required_keys__
        assert MetaInfo.__required_keys__ < set(plain["meta_info"]) <= set(MetaInfo.__annotations__)
        assert answer["choices"][0]["message"]["content"] == plain["text"].strip() != ""
        chunks = engine.chat("What is 17 + 25?", stream=True, **greedy)
        parts = [c["choices"][0]["delta"]["content"] or "" for c in chunks if c["choices"]]
        assert "".join(parts) == answer["choices"][0]["message"]["content"]
        assert asyncio.run(engine.async_chat(messages, **greedy))["choices"][0]["finish_reason"]
        with pytest.raises(ValueError, match="max_token") as caught:  # as SGLang's Engine raises
            engine.chat(messages, max_token=8)
        assert isinstance(caught.value, InvalidRequest)
        with pytest.raises(InvalidRequest, match=r"messages\[0\].role"):
            engine.chat([{"role": "nobody", "content": "x"}])


def test_generate_for_a_model_that_reasons() -> None:
    """A grammar begins behind the reasoning, which may be bounded; what a token was drawn from."""
    with radixlm.Engine(random_seed=1) as engine:
        prompt = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        sampling = {"max_new_tokens": 60, "temperature": 0.0, "regex": "[0-9]{4}"}
        whole = engine.generate(prompt, sampling, require_reasoning=True)
        thought, answer = whole["text"].split("</think>")
        assert re.fullmatch("[0-9]{4}", answer) and re.search("[a-z]", thought)
        counted = whole["meta_info"]["reasoning_tokens"]
        ids = whole["output_ids"][:counted]
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == f"{thought}</think>"
        events = list(engine.generate(prompt, sampling, require_reasoning=True, stream=True))
        assert events[-1]["meta_info"]["reasoning_tokens"] == counted
        bounded = engine.generate(
            prompt, sampling, require_reasoning=True, max_thinking_tokens=3,
            return_prompt_token_ids=True,
        )  # fmt: skip
        assert bounded["meta_info"]["reasoning_tokens"] == 4  # and the end marker
        assert bounded["output_ids"][:3] == ids[:3]
        assert bounded["prompt_token_ids"] == engine.tokenizer.encode(prompt, True)
        other = {**sampling, "custom_params": {"token_ids": ids[:1]}}
        both = engine.generate(
            prompt, other, max_thinking_tokens=3, require_reasoning=True,
            logit_processor="disallowed_tokens",
        )  # fmt: skip
        assert both["meta_info"]["reasoning_tokens"] == 4 and ids[0] not in both["output_ids"]
        chat = engine.chat("What is 2 + 3?", enable_thinking=True, thinking_token_budget=3)
        (choice,), usage = chat["choices"], chat["usage"]
        assert 0 < usage["reasoning_tokens"] <= 4 and choice["message"]["content"]
        drawn = engine.generate(
            prompt, {"max_new_tokens": 8, "top_k": 5, "temperature": 4}, return_sampling_mask=True
        )
        meta = drawn["meta_info"]
        masks = meta["output_token_sampling_mask"]
        assert len(masks) == meta["output_token_sampling_mask_length"] == 8
        assert "output_token_logprobs" not in meta
        for token, mask in zip(drawn["output_ids"], masks, strict=True):
            assert token in mask and len(mask) < 50  # equally likely tokens stay together
        asked = {"return_logprob": True, "top_logprobs_num": 2048, "return_entropy": [True, False]}
        both = engine.generate([prompt, prompt], {"max_new_tokens": 3, "temperature": 1}, **asked)
        assert "output_token_entropy_val" not in both[1]["meta_info"]
        meta = both[0]["meta_info"]
        rows = [[row[0] for row in rows] for rows in meta["output_top_logprobs"]]
        wanted = [-math.fsum(math.exp(value) * value for value in row) for row in rows]
        assert meta["output_token_entropy_val"] == pytest.approx(wanted, abs=1e-4)
        (alone,) = engine.generate([prompt], {"max_new_tokens": 3}, return_entropy=True)
        assert len(alone["meta_info"]["output_token_entropy_val"]) == 3
        assert "output_token_logprobs" not in alone["meta_info"]
        with pytest.raises(InvalidRequest, match=r"return_sampling_mask.*top_k"):
            engine.generate(prompt, {"top_p": 0.5}, return_sampling_mask=True)
    with radixlm.Engine(random_seed=1, reasoning_parser="none") as engine:
        with pytest.raises(InvalidRequest, match="--reasoning-parser"):
            engine.generate(prompt, sampling, require_reasoning=True)


def test_names_show_before_they_are_used() -> None:
    """In a fresh process: ``dir`` imports nothing, and the package says that it is typed."""
    code = (
        "import radixlm, sys; names = dir(radixlm); "
        "print({'Engine', 'ServerArgs', 'SamplingParams', 'gen'} <= set(names), 'torch' in "
        "sys.modules, 'radixlm.entrypoints.offline' in sys.modules, {'Any', '_LAZY'} & set(names))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.stdout.split() == ["True", "False", "False", "set()"]
    assert (Path(radixlm.__file__).parent / "py.typed").exists()


def test_an_engine_that_nobody_holds_ends() -> None:
    before = set(threading.enumerate())
    engine = radixlm.Engine()
    for _ in engine.generate("Hello", LONG, stream=True):
        break
    started = set(threading.enumerate()) - before
    assert {"intake", "engine"} <= {thread.name for thread in started}
    del engine
    gc.collect()
    for thread in started:
        if thread.name in ("intake", "engine"):
            thread.join(60)
            assert not thread.is_alive()


ENDS = """
import threading
from radixlm.entrypoints import offline
class Fake(offline.Engine):
    def __init__(self, name):
        self.name, self._is_shut = name, False
        self._thread = threading.Thread(target=threading.Event().wait, daemon=True)
        self._thread.start()
        offline._engines.add(self)
    def shutdown(self):
        self._is_shut = True
        if self.name == "dropped":
            threading.main_thread().join()
        print(self.name)
kept = Fake("kept")
dropped = Fake("dropped")
del dropped
"""


def test_the_end_of_a_program_shuts_its_engines() -> None:
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["dropped", "kept"] and not done.stderr


def test_shutdown_ends_the_calls_that_run() -> None:
    engine = radixlm.Engine(max_total_tokens=16_384)
    events = engine.generate("hello", LONG, stream=True)
    next(events)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate("other", LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while len(engine._engine.intake.requests) < 2:
        next(events)
    engine.shutdown()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(EngineError, match=SHUT):
        for _ in events:
            pass
    assert [str(failure) for failure in failures] == [SHUT]


def test_the_size_of_weights_is_that_of_the_packed_ones() -> None:
    plain, quantized = weights(), weights(quantization="w8a8_int8")
    assert weights(dtype="float32") > 1.9 * plain
    assert quantized < 0.6 * plain
    assert weights(torchao_config="int4wo-32") < 0.4 * plain


def test_shared_memory_counts_once() -> None:
    rows = torch.zeros(4, 8)
    assert stored_bytes({"a": rows, "b": [rows[:2], (rows.T,)]}) == 128
