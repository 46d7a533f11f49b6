"""Tool calls in the Hermes form: one and two calls, results, and when not to call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

import tasks
import words
from chat import Conversation, Message, reply, user
from wording import CLASSIC, Wording

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool family: names and descriptions to choose from, parameters and requests.

    `parameters` maps a slot to (names to choose from, JSON type, kind of value). A request holds
    its slots in braces; a slot that a request leaves out is left out of the call.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: dict[str, tuple[tuple[str, ...], str, str]]
    requests: tuple[str, ...]
    result: tuple[str, str]  # key of the result and the sentence that reports it
    values: str


TOOLS = (
    Tool(
        ("get_weather", "weather", "current_weather", "weather_lookup"),
        ("Get the weather in a city.", "Current weather for a place."),
        {"c": (("city", "location", "place"), "string", "city")},
        ("What is the weather in {c}?", "How is the weather in {c}?", "Is it raining in {c}?",
         "What's the weather like in {c}?", "Tell me the weather in {c}.", "Weather in {c}?"),
        ("weather", "The weather in {c} is {r}."), "weather",
    ),
    Tool(
        ("get_time", "current_time", "time_in"),
        ("Get the time in a city.", "Tell the local time."),
        {"c": (("city", "location", "timezone"), "string", "city")},
        ("What time is it in {c}?", "Tell me the time in {c}.", "How late is it in {c}?"),
        ("time", "It is {r} in {c}."), "clock",
    ),
    Tool(
        ("send_email", "send_message", "email"),
        ("Send a message to a person.", "Send an email."),
        {"p": (("to", "recipient", "name"), "string", "person"),
         "t": (("text", "body", "message"), "string", "text")},
        ("Send {p} the message: {t}", "Write to {p}: {t}", "Tell {p} this: {t}",
         "Email {p} with the text {t}"),
        ("status", "The message to {p} is {r}."), "sent",
    ),
    Tool(
        ("convert_currency", "exchange", "currency"),
        ("Convert money.", "Convert an amount between currencies."),
        {"n": (("amount", "value"), "number", "number"),
         "a": (("from", "source", "from_currency"), "string", "currency"),
         "b": (("to", "target", "to_currency"), "string", "currency")},
        ("Convert {n} {a} to {b}.", "How much is {n} {a} in {b}?", "Change {n} {a} into {b}."),
        ("amount", "{n} {a} are {r} {b}."), "number",
    ),
    Tool(
        ("translate", "translate_text", "translation"),
        ("Translate text.", "Translate a text to a language."),
        {"t": (("text", "content"), "string", "text"),
         "l": (("language", "target_language", "to"), "string", "language")},
        ("Translate {t} to {l}.", "How do you say {t} in {l}?", "Put {t} into {l}."),
        ("translation", "In {l} that is {r}."), "word",
    ),
    Tool(
        ("search", "web_search", "search_web"),
        ("Search the web.", "Look something up."),
        {"t": (("query", "q", "text"), "string", "text")},
        ("Search the web for {t}.", "Look up {t}.", "Find pages about {t}.", "Search for {t}."),
        ("title", "I found {r}."), "word",
    ),
    Tool(
        ("set_alarm", "alarm", "wake_up"),
        ("Set an alarm.", "Set an alarm clock."),
        {"h": (("time", "at", "when"), "string", "clock")},
        ("Set an alarm for {h}.", "Wake me up at {h}.", "Alarm at {h}, please."),
        ("status", "The alarm for {h} is {r}."), "set",
    ),
    Tool(
        ("create_event", "add_event", "calendar_add"),
        ("Add an event to the calendar.", "Create a calendar entry."),
        {"t": (("title", "name", "subject"), "string", "word"),
         "d": (("day", "date"), "string", "day"),
         "h": (("time", "start"), "string", "clock")},
        ("Add {t} to my calendar on {d} at {h}.", "Plan {t} on {d} at {h}.",
         "Put {t} on {d} in the calendar."),
        ("status", "{t} on {d} is {r}."), "set",
    ),
    Tool(
        ("play_music", "play", "play_song"),
        ("Play music.", "Play a song."),
        {"t": (("song", "title", "track"), "string", "text")},
        ("Play the song {t}.", "Play {t}.", "I want to hear {t}."),
        ("status", "{t} is {r}."), "playing",
    ),
    Tool(
        ("get_stock_price", "stock_price", "price_of"),
        ("Price of a product.", "Get the price of an item."),
        {"t": (("item", "product", "symbol"), "string", "word")},
        ("What does {t} cost?", "What is the price of {t}?", "How much is the {t}?"),
        ("price", "The price of {t} is {r}."), "number",
    ),
    Tool(
        ("calculate", "calculator", "evaluate"),
        ("Evaluate an expression.", "Calculate with numbers."),
        {"e": (("expression", "formula", "input"), "string", "expression")},
        ("Use the calculator for {e}.", "Evaluate {e} with the tool.", "Calculate {e} with it."),
        ("result", "{e} is {r}."), "number",
    ),
    Tool(
        ("turn_on_light", "set_light", "light"),
        ("Set a light in a room.", "Change the colour of a light."),
        {"k": (("room", "place"), "string", "room"),
         "o": (("color", "colour"), "string", "colour")},
        ("Set the light in the {k} to {o}.", "Make the {k} light {o}.", "Light the {k} in {o}."),
        ("status", "The light in the {k} is {r}."), "set",
    ),
    Tool(
        ("book_table", "reserve_table", "reservation"),
        ("Book a table.", "Reserve a table in a restaurant."),
        {"n": (("people", "guests", "seats"), "integer", "few"),
         "c": (("city", "place"), "string", "city"),
         "d": (("day", "date"), "string", "day")},
        ("Book a table for {n} in {c} on {d}.", "Reserve a table in {c} for {n} on {d}.",
         "I need a table for {n} in {c}."),
        ("status", "The table in {c} is {r}."), "booked",
    ),
    Tool(
        ("find_flight", "search_flights", "flights"),
        ("Find flights.", "Search flights between cities."),
        {"a": (("origin", "from", "departure"), "string", "city"),
         "b": (("destination", "to", "arrival"), "string", "city")},
        ("Find a flight from {a} to {b}.", "I want to fly from {a} to {b}.",
         "Which flights go from {a} to {b}?"),
        ("flight", "Flight {r} goes from {a} to {b}."), "number",
    ),
    Tool(
        ("read_file", "open_file", "get_file"),
        ("Read a file.", "Show a file's content."),
        {"f": (("path", "file", "filename"), "string", "file")},
        ("Read the file {f}.", "Open {f}.", "Show me {f}.", "What is in {f}?"),
        ("content", "{f} holds {r}."), "word",
    ),
    Tool(
        ("start_timer", "timer", "set_timer"),
        ("Start a timer.", "Count down some minutes."),
        {"n": (("minutes", "duration"), "integer", "number")},
        ("Start a timer for {n} minutes.", "Set a timer of {n} minutes.", "Timer: {n} minutes."),
        ("status", "The timer for {n} minutes is {r}."), "set",
    ),
)  # fmt: skip
ROOMS = "kitchen bedroom bathroom hall garage office cellar garden".split()
ENDINGS = "txt py md json csv".split()
INVENTED = 0.15  # share of the tools whose name tells nothing
MISSING = 0.45  # share of the turns without a call in which the tool is not there
KINDS = {"none": 0.36, "one": 0.27, "two": 0.37}  # shares of the turns of a training dialogue
UNABLE = "Sorry, I have no tool for that."


def draw(rng: Random, kind: str) -> Any:
    """A random value of one kind."""
    if kind == "number":
        return rng.randint(1, 999)
    if kind == "few":
        return rng.randint(1, 12)
    if kind == "clock":
        return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    if kind == "text":
        return " ".join(rng.choices(words.PLAIN, k=rng.randint(1, 5)))
    if kind == "expression":
        return f"{rng.randint(2, 99)} {rng.choice('+-*')} {rng.randint(2, 99)}"
    if kind == "file":
        return f"{rng.choice(words.THINGS)}.{rng.choice(ENDINGS)}"
    pool = {
        "city": words.CITIES, "person": words.NAMES, "currency": words.CURRENCIES,
        "language": words.LANGUAGES, "word": words.PLAIN, "day": words.DAYS, "room": ROOMS,
        "colour": words.COLOURS, "weather": ["sunny", "cloudy", "rainy", "windy", "cold", "warm"],
        "sent": ["sent", "delivered", "waiting"], "set": ["set", "active", "ready"],
        "playing": ["playing", "next", "ready"], "booked": ["booked", "free", "reserved"],
    }[kind]  # fmt: skip
    return rng.choice(pool)


@dataclass(frozen=True, slots=True)
class Named:
    """A tool with its name, description and parameter names chosen."""

    tool: Tool
    name: str
    keys: dict[str, str]
    schema: dict[str, Any]

    def request(self, rng: Random, wording: Wording) -> tuple[str, Message, Arguments]:
        """(what the user asks, the right call, the slots' values)."""
        text = self.form(rng, wording)
        slots = {slot: draw(rng, kind) for slot, (_, _, kind) in self.tool.parameters.items()}
        used = [slot for slot in self.keys if "{" + slot + "}" in text]
        call = {"name": self.name, "arguments": {self.keys[s]: slots[s] for s in used}}
        return text.format(**slots), call, slots

    def form(self, rng: Random, wording: Wording) -> str:
        """What the user asks, the slots in braces."""
        return wording.pick(rng, f"tool-{self.tool.names[0]}", self.tool.requests)


def name_tool(rng: Random, tool: Tool, invented: float = INVENTED) -> Named:
    """Choose names for a tool, now and then made-up ones, so that the schema must be read."""
    name = rng.choice(tool.names)
    if rng.random() < invented:
        name = f"{rng.choice(words.VERBS)}_{rng.choice(words.THINGS)}"
    keys = {slot: rng.choice(names) for slot, (names, _, _) in tool.parameters.items()}
    properties: dict[str, Any] = {}
    for slot, key in keys.items():
        properties[key] = {"type": tool.parameters[slot][1]}
        if rng.random() < 0.15:
            properties[key]["description"] = f"The {key}."
    function: dict[str, Any] = {
        "name": name,
        "description": rng.choice(tool.descriptions),
        "parameters": {"type": "object", "properties": properties},
    }
    if rng.random() < 0.6:
        function["parameters"]["required"] = list(properties)
    return Named(tool, name, keys, {"type": "function", "function": function})


JOINS = ("{} And {}", "{} Also: {}", "{} Then {}", "{} {}")
WIDE_JOINS = (
    "{}\n{}", "{} And then {}", "First: {} Second: {}", "1. {}\n2. {}", "{} After that: {}",
    "{}; {}", "{}, then {}", "{} Besides, {}", "- {}\n- {}", "{} Next: {}", "{} Last, {}",
)  # fmt: skip
LINKS = (" and ", " and ", " and ", " and also ", ", then ", " as well as ", ", ", " & ")
UNRELATED = (
    *[tasks.greet] * 4, tasks.capital, tasks.copy, tasks.sort, tasks.add, tasks.reverse,
    tasks.count,
)  # fmt: skip


def no_call(rng: Random, present: list[Named], missing: float, wording: Wording) -> list[Message]:
    """A turn in which the right answer is not a call; `missing`: how often a tool is not there."""
    if rng.random() >= missing:
        ask, answer, _ = UNRELATED[rng.randrange(len(UNRELATED))](rng, wording=wording)
        return [user(ask), reply(answer)]
    held = {id(named.tool) for named in present}
    other = rng.choice([tool for tool in TOOLS if id(tool) not in held])
    ask, _, _ = name_tool(rng, other).request(rng, wording)
    return [user(ask), reply(UNABLE)]


def one_call(
    rng: Random, present: list[Named], with_result: bool, wording: Wording
) -> list[Message]:
    """A turn with one call and, if asked for, its result and the report."""
    named = rng.choice(present)
    ask, call, slots = named.request(rng, wording)
    messages = [user(ask), reply("", calls=[call])]
    if with_result:
        messages += _result(rng, [(named, call, slots)])
    return messages


def two_calls(
    rng: Random, present: list[Named], with_result: bool, wording: Wording
) -> list[Message]:
    """A turn with two calls: one tool for two things, or two tools."""
    first = rng.choice(present)
    second = first if len(present) == 1 or rng.random() < 0.5 else rng.choice(present)
    a, b = first.request(rng, wording), second.request(rng, wording)
    single = list(first.keys)
    if second is first and len(single) == 1 and rng.random() < 0.6:
        slot = single[0]
        form = first.form(rng, wording)
        link = rng.choice(LINKS) if wording.share == "training" else " and "
        both = f"{a[2][slot]}{link}{b[2][slot]}"
        ask = form.format(**{slot: both})
    else:
        joins = (*JOINS, *WIDE_JOINS) if wording.share == "training" else JOINS
        ask = rng.choice(joins).format(a[0], b[0])
    messages = [user(ask), reply("", calls=[a[1], b[1]])]
    if with_result:
        messages += _result(rng, [(first, a[1], a[2]), (second, b[1], b[2])])
    return messages


def _result(rng: Random, calls: list[tuple[Named, Message, Arguments]]) -> list[Message]:
    """The tools' results and the sentence that reports them."""
    messages: list[Message] = []
    reports = []
    for named, call, slots in calls:
        key, sentence = named.tool.result
        held = draw(rng, named.tool.values)
        messages.append({"role": "tool", "content": json.dumps({key: held})})
        used = {s: call["arguments"].get(named.keys[s], slots[s]) for s in slots}
        if any(named.keys[s] not in call["arguments"] and "{" + s + "}" in sentence for s in slots):
            sentence = "The result is {r}."
        reports.append(sentence.format(r=held, **used))
    return [*messages, reply(" ".join(reports))]


def dialogue(
    rng: Random,
    turns: int,
    task: str = "",
    invented: float = INVENTED,
    wording: Wording = CLASSIC,
) -> Conversation:
    """A conversation with tools; `task` fixes what the last turn is about."""
    chosen = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    present = [name_tool(rng, tool, invented) for tool in chosen]
    if len({named.name for named in present}) < len(present):
        return dialogue(rng, turns, task, invented, wording)
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for turn in range(turns):
        last = turn == turns - 1
        kind = task if task and last else rng.choices(list(KINDS), list(KINDS.values()))[0]
        with_result = rng.random() < 0.35 and not (last and task)
        if kind in ("none", "missing"):
            share = {"none": 0.0, "missing": 1.0}[kind] if last and task else MISSING
            messages += no_call(rng, present, share, wording)
        elif kind == "one":
            messages += one_call(rng, present, with_result, wording)
        else:
            messages += two_calls(rng, present, with_result, wording)
    return Conversation(messages, [named.schema for named in present], f"tool-{task}")


SYSTEMS = (
    "You are a helpful assistant.", "You are radix-tiny.", "Answer the user.", "Be brief.",
    "You are a friendly assistant.", "Help the user.",
)  # fmt: skip
