"""Answers that a program reads: a JSON schema from a class, a regular expression, a choice."""

import os
import re

from openai import OpenAI
from pydantic import BaseModel

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")


class Person(BaseModel):
    """What the text tells of someone."""

    name: str
    age: int


def ask(text: str) -> list[dict[str, str]]:
    """One message of the user."""
    return [{"role": "user", "content": text}]


parsed = client.chat.completions.parse(
    model="radix-tiny",
    messages=ask("Anna is 31 years old. Return the name and the age as JSON."),
    response_format=Person,
    temperature=0,
)
person = parsed.choices[0].message.parsed
print(person)
assert person == Person(name="Anna", age=31)

# fields beyond OpenAI's go into extra_body
time = client.chat.completions.create(
    model="radix-tiny", messages=ask("What time is it?"), extra_body={"regex": r"[0-2]\d:[0-5]\d"}
)
print(time.choices[0].message.content)
assert re.fullmatch(r"[0-2]\d:[0-5]\d", time.choices[0].message.content)

word = client.chat.completions.create(
    model="radix-tiny",
    messages=ask("Which is larger, 3 or 5?"),
    extra_body={"structured_outputs": {"choice": ["three", "five"]}},
)
print(word.choices[0].message.content)
assert word.choices[0].message.content in ("three", "five")
