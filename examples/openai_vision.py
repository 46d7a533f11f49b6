"""A question on a picture. Start `radixlm serve zoo/models/radix-tiny-vl --port 30002` first."""

import base64
import io
import os

from openai import OpenAI
from PIL import Image, ImageDraw

url = os.environ.get("RADIXLM_VISION_URL", "http://127.0.0.1:30002")
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def data_uri(colour: str) -> str:
    """A picture of 96 x 96 with a filled circle, as a PNG in a data URI."""
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).ellipse((28, 28, 68, 68), fill=colour)
    out = io.BytesIO()
    picture.save(out, "png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


for colour in ("red", "blue"):
    content = [
        {"type": "image_url", "image_url": {"url": data_uri(colour)}},
        {"type": "text", "text": "What colour is the circle?"},
    ]
    answer = client.chat.completions.create(
        model="radix-tiny-vl", messages=[{"role": "user", "content": content}], temperature=0
    )
    print(colour, "->", answer.choices[0].message.content)
    assert colour in answer.choices[0].message.content.lower()
