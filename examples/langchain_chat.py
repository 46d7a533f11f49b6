"""LangChain: a chain, a stream, a tool and a structured answer."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="radix-tiny", temperature=0)

chain = ChatPromptTemplate.from_template("What is {a} + {b}?") | model | StrOutputParser()
answer = chain.invoke({"a": 17, "b": 25})
print(answer)
assert answer == "42"
assert "".join(chain.stream({"a": 17, "b": 25})) == answer
assert chain.batch([{"a": 1, "b": 2}, {"a": 30, "b": 4}]) == ["3", "34"]


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"20 degrees in {city}"


calls = model.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
print(calls)
assert get_weather.invoke(calls[0]["args"]) == "20 degrees in Paris"


class Person(BaseModel):
    """What the text tells of someone."""

    name: str
    age: int


reader = model.with_structured_output(Person, method="json_schema")
person = reader.invoke("Anna is 31 years old. Return the name and the age as JSON.")
print(person)
assert person == Person(name="Anna", age=31)
