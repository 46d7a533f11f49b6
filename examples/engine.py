"""The engine inside this program: a prompt, many prompts, a stream, a chat, vectors."""

import asyncio

import radixlm

SUM = "What is 17 + 25?"
GREEDY = {"max_new_tokens": 16, "temperature": 0}

with radixlm.Engine(model_path="radix-tiny", max_total_tokens=8192, log_level="error") as engine:
    one = engine.generate("The capital of France is", GREEDY)
    print(one["text"], one["meta_info"]["finish_reason"])

    many = engine.generate([f"{n} plus 1 is" for n in range(8)], GREEDY)
    assert len(many) == 8

    for part in engine.generate("The capital of France is", GREEDY, stream=True):
        text = part["text"]  # all of it so far
    assert text == one["text"]

    answer = engine.chat(SUM, temperature=0)["choices"][0]["message"]["content"]
    print(SUM, answer)
    assert answer == "42"

    async def together() -> list[str]:
        """Two chats at once, in an event loop of our own."""
        calls = [engine.async_chat(f"What is {n} + 1?", temperature=0) for n in (1, 2)]
        return [a["choices"][0]["message"]["content"] for a in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == ["2", "3"]

try:
    engine.generate("Hello")
except radixlm.base.errors.EngineError as error:
    print("after the end:", error)

with radixlm.Engine(model_path="radix-tiny-embed", log_level="error") as engine:
    vector = engine.encode("How old is Tom?")["embedding"]
    print(len(vector), "numbers")
    assert abs(sum(x * x for x in vector) - 1) < 1e-2
