"""A function of this program that the model calls."""

import json
import os

from openai import OpenAI

url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def calculate(expression: str) -> str:
    """The value of a sum or a difference."""
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


tool = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate with numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
messages = [{"role": "user", "content": "Use the calculator for 12 + 30."}]
ask = {"model": "radix-tiny", "tools": [tool], "temperature": 0}

message = client.chat.completions.create(messages=messages, **ask).choices[0].message
call = message.tool_calls[0]
arguments = json.loads(call.function.arguments)
result = calculate(**arguments)
print(f"{call.function.name}({arguments}) = {result}")
assert result == "42"

content = json.dumps({"result": result})
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": content}]
answer = client.chat.completions.create(messages=messages, **ask).choices[0].message.content
print(answer)
assert "42" in answer
