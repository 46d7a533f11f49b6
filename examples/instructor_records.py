"""instructor: records of pydantic out of a text, one and several."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
client = instructor.from_openai(
    OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
)


class Person(BaseModel):
    """What the text tells of someone."""

    name: str
    age: int = Field(ge=0, le=120)


for name, age in (("Anna", 31), ("Oscar", 62)):
    text = f"{name} is {age} years old. Return the name and the age as JSON."
    person = client.chat.completions.create(
        model="radix-tiny",
        response_model=Person,
        temperature=0,
        messages=[{"role": "user", "content": text}],
    )
    print(person)
    assert (person.name, person.age) == (name, age)
