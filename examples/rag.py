"""Retrieve, rank, answer: embeddings find candidates, rerank orders them, a chat answers.

Start `radixlm serve` and `radixlm serve zoo/models/radix-tiny-embed --port 30001` first.
"""

import os

import httpx
from openai import OpenAI

chat_url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
embed_url = os.environ.get("RADIXLM_EMBED_URL", "http://127.0.0.1:30001")
vectors = OpenAI(base_url=f"{embed_url}/v1", api_key="none")
chat = OpenAI(base_url=f"{chat_url}/v1", api_key="none")

documents = [
    "Anna lives in Rome.",
    "The pet of Anna is a dog.",
    "The job of Tom is baker.",
    "Tom is 45 years old.",
    "The favourite food of Lena is soup.",
]
question = "How old is Tom?"


def embed(texts: list[str]) -> list[list[float]]:
    """A vector of length 1 for each text."""
    answer = vectors.embeddings.create(model="radix-tiny-embed", input=texts)
    return [one.embedding for one in answer.data]


def dot(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


stored = embed(documents)  # a vector store would keep these
(asked,) = embed([question])
nearest = sorted(range(len(documents)), key=lambda i: -dot(asked, stored[i]))[:3]
found = [documents[i] for i in nearest]
print("found:", found)

body = {"query": question, "documents": found, "top_n": 2}
ranked = httpx.post(f"{embed_url}/rerank", json=body, timeout=60).json()["results"]
context = " ".join(found[one["index"]] for one in ranked)
print("context:", context)

prompt = f"Read the text and answer.\n\n{context}\n\n{question}"
answer = chat.chat.completions.create(
    model="radix-tiny", temperature=0, messages=[{"role": "user", "content": prompt}]
)
print("answer:", answer.choices[0].message.content)
assert "45" in answer.choices[0].message.content
