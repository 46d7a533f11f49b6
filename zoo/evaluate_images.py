"""The score table of the model that sees, through an OpenAI-compatible server.

python zoo/evaluate_images.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import images
from PIL import Image


def ask(url: str, task: str, seed: int) -> bool:
    """Whether one held-out item is answered exactly."""
    picture, item = images.evaluation(task, seed)
    data = io.BytesIO()
    Image.fromarray(picture.pixels).save(data, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    text = item.messages[0]["content"][1]
    parts = [{"type": "image_url", "image_url": {"url": source}}, text]
    body: dict[str, Any] = {
        "model": "default", "messages": [{"role": "user", "content": parts}], "temperature": 0,
        "max_tokens": 12,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        made = json.load(answer)["choices"][0]["message"]["content"] or ""
    return bool(made.strip() == item.answer()["content"])


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--items", type=int, default=200)
    args = parser.parse_args()
    print("| task | right % |\n| --- | --- |")
    for task in images.EVALUATIONS:
        with ThreadPoolExecutor(16) as pool:
            right = sum(pool.map(lambda seed, t=task: ask(args.url, t, seed), range(args.items)))
        print(f"| {task} | {100 * right / args.items:.1f} |", flush=True)


if __name__ == "__main__":
    main()
