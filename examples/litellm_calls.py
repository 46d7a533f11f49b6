"""LiteLLM: one function for a chat, a stream, embeddings and Anthropic's form."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # look up no prices

import litellm

litellm.suppress_debug_info = True
url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
embed_url = os.environ.get("RADIXLM_EMBED_URL", "http://127.0.0.1:30001")
ask = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}

for name, base in (
    ("openai/radix-tiny", f"{url}/v1"),
    ("hosted_vllm/radix-tiny", f"{url}/v1"),
    ("anthropic/radix-tiny", url),
    ("ollama_chat/radix-tiny", url),
):
    answer = litellm.completion(model=name, api_base=base, api_key="none", max_tokens=16, **ask)
    print(name, "->", answer.choices[0].message.content)
    assert answer.choices[0].message.content == "42"

stream = litellm.completion(
    model="openai/radix-tiny", api_base=f"{url}/v1", api_key="none", stream=True, **ask
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "42"

vectors = litellm.embedding(
    model="openai/radix-tiny-embed", input=["a", "b"], api_base=f"{embed_url}/v1", api_key="none"
)
print(len(vectors.data), "vectors of", len(vectors.data[0]["embedding"]))
assert len(vectors.data) == 2
