"""A file of requests that are answered in the background."""

import json
import os
import time

from openai import OpenAI

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")
sums = {f"{a} + {b}": a + b for a, b in ((1, 2), (17, 25), (40, 50))}

lines = [
    {
        "custom_id": text,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "radix-tiny",
            "temperature": 0,
            "messages": [{"role": "user", "content": f"What is {text}?"}],
        },
    }
    for text in sums
]
data = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("sums.jsonl", data), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
for _ in range(600):
    batch = client.batches.retrieve(batch.id)
    if batch.status in ("completed", "failed", "expired", "cancelled"):
        break
    time.sleep(0.1)
print(batch.status, batch.request_counts)
assert batch.status == "completed" and batch.request_counts.completed == len(sums)

answers = client.files.content(batch.output_file_id).text.splitlines()
for answer in map(json.loads, answers):
    text = answer["response"]["body"]["choices"][0]["message"]["content"]
    print(answer["custom_id"], "=", text)
    assert text == str(sums[answer["custom_id"]])
