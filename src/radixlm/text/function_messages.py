"""Messages of OpenAI's older form of tools: ``function_call`` of the assistant and the role
``function``."""

from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.base.errors import InvalidRequest


def with_tool_calls(messages: Sequence[Any], keeps_role: bool) -> list[Any]:
    """``messages`` with ``tool_calls`` for ``function_call``, and the role ``tool`` for
    ``function`` unless ``keeps_role``. InvalidRequest names a call that is no object."""
    read: list[Any] = []
    num_calls = 0
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            read.append(message)
        elif message.get("function_call") is not None:
            num_calls += 1
            read.append(_with_call(message, place, _call_id(num_calls)))
        elif message.get("role") == "function" and not keeps_role:
            answered = {"role": "tool", "tool_call_id": _call_id(num_calls)}
            read.append({**message, **answered})
        else:
            read.append(message)
    return read


def _with_call(message: Mapping[str, Any], place: int, call_id: str) -> dict[str, Any]:
    call = message["function_call"]
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        where = f"messages[{place}].function_call"
        raise InvalidRequest(f"{where} must be an object with name and arguments", where)
    made = {key: value for key, value in message.items() if key != "function_call"}
    if made.get("tool_calls") is None:  # a client may send back both forms
        made["tool_calls"] = [{"id": call_id, "type": "function", "function": dict(call)}]
    return made


def _call_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates want."""
    return f"call{number:05d}"
