"""A conversation of two turns with OpenAI's client, whole and as a stream."""

import os

from openai import OpenAI

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "My name is Anna."}]
first = client.chat.completions.create(model=model, messages=messages, temperature=0)
print("1:", first.choices[0].message.content)

messages += [first.choices[0].message, {"role": "user", "content": "What is my name?"}]
second = client.chat.completions.create(model=model, messages=messages, temperature=0)
print("2:", second.choices[0].message.content)
assert "Anna" in second.choices[0].message.content

parts = []
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        parts.append(chunk.choices[0].delta.content or "")
        print(parts[-1], end="", flush=True)
    else:
        usage = chunk.usage
print(f"\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out")
assert "".join(parts) == second.choices[0].message.content
assert usage.completion_tokens == second.usage.completion_tokens
