"""Answering from a passage, remembering what was said, and extraction to JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import words
from chat import Conversation, Message, reply, user
from wording import CLASSIC, Wording

UNKNOWN = "The text does not say."
FACTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "city": (
        "city",
        ("{s} lives in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "In which city does {s} live?"),
    ),
    "job": (
        "job",
        ("{s} works as a {v}.", "The job of {s} is {v}."),
        ("What is the job of {s}?", "What does {s} work as?"),
    ),
    "pet": (
        "pet",
        ("{s} has a {v} at home.", "The pet of {s} is a {v}."),
        ("What pet does {s} have?", "Which animal does {s} have?"),
    ),
    "age": (
        "age",
        ("{s} is {v} years old.", "The age of {s} is {v}."),
        ("How old is {s}?", "What is the age of {s}?"),
    ),
    "colour": (
        "colour",
        ("{s} likes the colour {v}.", "The favourite colour of {s} is {v}."),
        ("Which colour does {s} like?", "What is the favourite colour of {s}?"),
    ),
    "food": (
        "food",
        ("{s} likes to eat {v}.", "The favourite food of {s} is {v}."),
        ("What does {s} like to eat?", "What is the favourite food of {s}?"),
    ),
    "code": (
        "code",
        ("The code of {s} is {v}.", "{s} uses the code {v}."),
        ("What is the code of {s}?", "Which code does {s} use?"),
    ),
    "day": (
        "day",
        ("{s} comes on {v}.", "{s} visits us on {v}."),
        ("On which day does {s} come?", "When does {s} visit us?"),
    ),
}
FILLER = (
    "It was a {a} day.", "The {n} was very {a}.", "Nobody saw the {n}.", "They like to {k}.",
    "There is a {a} {n} here.", "We saw a {n} and a {m}.", "The {n} is near the {m}.",
)  # fmt: skip


STRANGE = 0.25  # share of the values and half that of the names that are invented


def ask_of(rng: Random, kind: str, name: str, wording: Wording) -> str:
    """The question for one fact."""
    return wording.pick(rng, f"ask-{kind}", FACTS[kind][2]).format(s=name)


def people(rng: Random, wording: Wording) -> list[str]:
    """The names that facts are told about, some of them invented."""
    if not wording.is_wide or rng.random() < 0.5:
        return words.NAMES
    made = {words.invented(rng).capitalize() for _ in range(len(words.NAMES) // 4)}
    return sorted(made | set(words.NAMES))


def value(rng: Random, kind: str, wording: Wording = CLASSIC) -> str:
    """A random value for one kind of fact."""
    if wording.is_wide and kind not in ("age", "day") and rng.random() < STRANGE:
        return words.invented(rng)
    if kind == "age":
        return str(rng.randint(5, 99))
    if kind == "code":
        return str(rng.randint(100, 99999))
    pool = {
        "city": words.CITIES, "job": words.JOBS, "pet": words.ANIMALS, "colour": words.COLOURS,
        "food": words.FOODS, "day": words.DAYS,
    }[kind]  # fmt: skip
    return rng.choice(pool)


def passage(
    rng: Random,
    num_facts: int,
    num_questions: int,
    ahead: float = 0.0,
    wording: Wording = CLASSIC,
) -> Conversation:
    """A passage of facts with distractors, and questions on it, one a turn.

    `ahead`: how often the first question certainly stands before the passage.
    """
    names = people(rng, wording)
    pairs = [(name, kind) for name in names for kind in FACTS]
    facts = [(name, kind, value(rng, kind, wording)) for name, kind in rng.sample(pairs, num_facts)]
    lines = []
    for name, kind, held in facts:
        lines.append(rng.choice(FACTS[kind][1]).format(s=name, v=held))
        if rng.random() < 0.1:
            lines.append(
                rng.choice(FILLER).format(
                    a=rng.choice(words.ADJECTIVES), n=rng.choice(words.THINGS),
                    m=rng.choice(words.THINGS), k=rng.choice(words.VERBS),
                )
            )  # fmt: skip
    known = {(name, kind) for name, kind, _ in facts}
    text = rng.choice((" ", " ", "\n")).join(lines)
    messages: list[Message] = []
    for turn in range(num_questions):
        name, kind, held = rng.choice(facts)
        if rng.random() < 0.07:
            other = rng.choice(names)
            if (other, kind) not in known:
                name, held = other, UNKNOWN
        ask = ask_of(rng, kind, name, wording)
        if turn == 0:
            if wording.is_classic(rng):
                ask = _place(rng, text, ask, messages, ahead)
            else:
                ask = wording.pick(rng, "frame", ()).format(t=text, q=ask)
        messages += [user(ask), reply(held)]
    return Conversation(messages, task="passage")


def _place(rng: Random, text: str, ask: str, messages: list[Message], ahead: float) -> str:
    """Put the passage before or behind the first question, or into the system turn."""
    kind = 1 if ahead and rng.random() < ahead else rng.randrange(5)
    if kind == 0:
        messages.append({"role": "system", "content": f"Answer from this text.\n{text}"})
        return ask
    if kind == 1:
        return f"{ask}\n\n{text}"
    if kind == 2:
        return f"Read the text and answer.\n\n{text}\n\n{ask}"
    return f"{text}\n\n{ask}"


def growing(rng: Random, num_turns: int, most: int = 4, wording: Wording = CLASSIC) -> Conversation:
    """Every turn asks first and then tells up to `most` new facts: many answers for few tokens.

    A question before its text is hard: only one question a passage can stand there.
    """
    pairs = [(name, kind) for name in people(rng, wording) for kind in FACTS]
    rng.shuffle(pairs)
    told: list[tuple[str, str, str]] = []
    messages: list[Message] = []
    for _ in range(num_turns):
        fresh = [
            (n, k, value(rng, k, wording))
            for n, k in (pairs.pop() for _ in range(rng.randint(1, most)))
        ]
        told += fresh
        name, kind, held = rng.choice(fresh if rng.random() < 0.6 else told)
        if rng.random() < 0.07:
            (name, kind), held = pairs[0], UNKNOWN
        text = rng.choice((" ", "\n")).join(
            rng.choice(FACTS[k][1]).format(s=n, v=v) for n, k, v in fresh
        )
        messages += [user(f"{ask_of(rng, kind, name, wording)}\n\n{text}"), reply(held)]
    return Conversation(messages, task="passage")


def remember(rng: Random, wording: Wording = CLASSIC) -> Conversation:
    """Something that the user says about themselves, asked for later."""
    name = rng.choice(words.NAMES)
    if wording.is_wide and rng.random() < STRANGE:
        name = words.invented(rng).capitalize()
    say, ask = _told(rng, "name", "My name is {}.", "What is my name?", wording)
    facts = {"name": (say.format(name), f"Nice to meet you, {name}!", ask, f"Your name is {name}.")}
    for kind, pool in (("city", words.CITIES), ("colour", words.COLOURS), ("pet", words.ANIMALS)):
        held = rng.choice(pool)
        say, ask, answer = {
            "city": ("I live in {}.", "Where do I live?", "You live in {}."),
            "colour": ("I like the colour {}.", "Which colour do I like?", "You like {}."),
            "pet": ("I have a {}.", "Which pet do I have?", "You have a {}."),
        }[kind]
        say, ask = _told(rng, kind, say, ask, wording)
        facts[kind] = (say.format(held), "I will remember that.", ask, answer.format(held))
    chosen = rng.sample(list(facts.values()), rng.randint(1, 3))
    if rng.random() < 0.3 and facts["name"] not in chosen:
        chosen.append(facts["name"])
    messages: list[Message] = []
    for said, nod, _, _ in chosen:
        greeting = rng.choice(("", "Hi! ", "Hello, ")) if not messages else ""
        greeting = greeting if wording.is_classic(rng) else ""
        said = f"{greeting}{said}".replace(", My", ", my")
        messages += [user(said), reply(nod)]
    for _, _, ask, answer in rng.sample(chosen, rng.randint(1, len(chosen))):
        messages += [user(ask), reply(answer)]
    return Conversation(messages, task="memory")


def _told(rng: Random, kind: str, say: str, ask: str, wording: Wording) -> tuple[str, str]:
    """How something is said and how it is asked for later."""
    return (
        wording.pick(rng, f"tell-{kind}", (say,)),
        wording.pick(rng, f"recall-{kind}", (ask,)),
    )


Field = tuple[str, tuple[str, ...], Any]


def _fields(rng: Random, kind: str, wording: Wording) -> tuple[str, list[Field]]:
    """(subject, fields); a field is (sentence, names to choose from, value)."""
    if kind in RECORDS:
        return _record(rng, kind)
    person, city = rng.choice(words.NAMES), rng.choice(words.CITIES)
    strange = 2 * STRANGE if wording.share == "training" else STRANGE
    if wording.is_wide and rng.random() < strange:
        person, city = words.invented(rng).capitalize(), words.invented(rng).capitalize()
    number, price = rng.randint(1, 99), rng.randint(1, 999)
    thing, colour = rng.choice(words.THINGS), rng.choice(words.COLOURS)
    job, animal = rng.choice(words.JOBS), rng.choice(words.ANIMALS)
    day, month = rng.choice(words.DAYS), rng.choice(words.MONTHS)
    flag = rng.random() < 0.5
    tables: dict[str, list[Field]] = {
        "person": [
            (f"{person} is {number} years old", ("age", "years"), number),
            (f"lives in {city}", ("city", "town", "home"), city),
            (f"works as a {job}", ("job", "profession"), job),
            (f"has a {animal}", ("pet", "animal"), animal),
            (f"likes {colour}", ("colour", "favourite_colour"), colour),
            (f"is {'' if flag else 'not '}married", ("married", "is_married"), flag),
        ],
        "order": [
            (f"{person} buys {number} pieces", ("quantity", "count", "amount"), number),
            (f"of the {thing}", ("item", "product"), thing),
            (f"in {colour}", ("colour", "color"), colour),
            (f"for {price} euros", ("price", "cost"), price),
            (f"to be sent to {city}", ("city", "destination"), city),
            (f"and has {'' if flag else 'not '}paid", ("paid", "is_paid"), flag),
        ],
        "event": [
            (f"{person} gives a party on {day}", ("day", "weekday"), day),
            (f"in {month}", ("month",), month),
            (f"in {city}", ("city", "place", "location"), city),
            (f"for {number} guests", ("guests", "people"), number),
            (f"and brings a {animal}", ("animal", "pet"), animal),
            (f"which is {'' if flag else 'not '}open to all", ("open", "public"), flag),
        ],
    }
    return person, tables[kind]


RECORDS: dict[str, tuple[tuple[tuple[str, tuple[str, ...], str], ...], tuple[str, ...]]] = {
    "animal": (
        (("{s} is a {v}", ("species", "animal", "kind"), "animal"),
         ("is {v} years old", ("age", "years"), "few"), ("weighs {v} kg", ("weight", "kg"), "few"),
         ("belongs to {v}", ("owner", "keeper"), "name"), ("eats {v}", ("food", "diet"), "food"),
         ("is {v}vaccinated", ("vaccinated", "is_vaccinated"), "flag")),
        ("name", "pet_name"),
    ),
    "trip": (
        (("{s} travels to {v}", ("destination", "to", "city"), "city"),
         ("from {v}", ("origin", "from"), "city"), ("on {v}", ("day", "date"), "day"),
         ("with {v} bags", ("bags", "luggage"), "few"),
         ("for {v} nights", ("nights", "stay"), "few"),
         ("and has {v}paid", ("paid", "is_paid"), "flag")),
        ("traveller", "guest", "name", "passenger"),
    ),
    "product": (
        (("The {s} costs {v} dollars", ("price", "cost"), "number"),
         ("comes in {v}", ("colour", "color"), "colour"),
         ("weighs {v} grams", ("weight",), "number"),
         ("is made in {v}", ("origin", "made_in"), "city"), ("is sold by {v}", ("seller",), "name"),
         ("is {v}in stock", ("in_stock", "available"), "flag")),
        ("product", "item"),
    ),
    "job": (
        (("{s} starts as a {v}", ("position", "role", "title"), "job"),
         ("in {v}", ("city", "office", "location"), "city"), ("on {v}", ("start", "day"), "day"),
         ("with {v} days off", ("days_off", "holidays"), "few"),
         ("for {v} euros", ("salary", "pay"), "number"),
         ("and works {v}from home", ("remote", "home_office"), "flag")),
        ("employee", "worker", "name", "staff"),
    ),
}  # fmt: skip
"""Training only: the fields of more kinds of records, and the keys of whom they are about."""


def _record(rng: Random, kind: str) -> tuple[str, list[Field]]:
    """(subject, fields) of one of RECORDS; half of the names are invented."""
    pools = {
        "animal": words.ANIMALS, "name": words.NAMES, "food": words.FOODS, "city": words.CITIES,
        "day": words.DAYS, "colour": words.COLOURS, "job": words.JOBS,
    }  # fmt: skip
    subject = rng.choice(words.THINGS if kind == "product" else words.NAMES)
    if rng.random() < 0.5:
        subject = words.invented(rng)
    fields: list[Field] = []
    for sentence, keys, pool in RECORDS[kind][0]:
        held: Any = rng.randint(1, 999 if pool == "number" else 20)
        shown = ""
        if pool == "flag":
            held = rng.random() < 0.5
            shown = "" if held else "not "
        elif pool in pools:
            held = rng.choice(pools[pool])
            if pool in ("name", "city") and rng.random() < 0.5:
                held = words.invented(rng).capitalize()
        made = sentence.format(s=subject, v=shown if pool == "flag" else held)
        fields.append((made, keys, held))
    return subject, fields


def extract(rng: Random, wording: Wording = CLASSIC) -> Conversation:
    """Extraction to JSON for a schema that varies, several texts for one schema."""
    kinds = ["person", "order", "event"]
    kind = rng.choice([*kinds, *RECORDS] if wording.share == "training" else kinds)
    style = rng.randrange(4)
    keys: list[tuple[int, str]] = []
    messages: list[Message] = []
    for turn in range(rng.choice((1, 2, 3, 4, 5))):
        name, fields = _fields(rng, kind, wording)
        if turn == 0:
            chosen = rng.sample(range(len(fields)), rng.randint(1, 4))
            keys = [(i, rng.choice(fields[i][1])) for i in chosen]
            who = {"person": ("name", "person"), "order": ("customer", "buyer", "name"),
                   "event": ("host", "name")}.get(kind) or RECORDS[kind][1]  # fmt: skip
            if rng.random() < 0.7:
                keys.insert(rng.randint(0, len(keys)), (-1, rng.choice(who)))
        held = {key: name if i < 0 else fields[i][2] for i, key in keys}
        shown = {0} | {i for i, _ in keys if i >= 0} | set(rng.sample(range(6), 2))
        text = _sentence(kind, [fields[i][0] for i in sorted(shown)])
        ask = text
        if turn == 0 and wording.is_classic(rng):
            ask = _json_request(style, held, text)
        elif turn == 0:
            keys_named = rng.choice((", ", " and ", ",")).join(held)
            ask = wording.pick(rng, "json", ()).format(k=keys_named, t=text)
        messages += [user(ask), reply(json.dumps(held))]
    return Conversation(messages, task="json")


def _sentence(kind: str, parts: list[str]) -> str:
    if kind in ("person", "animal", "product") and len(parts) > 1:
        return ", ".join(parts[:-1]) + " and " + parts[-1] + "."
    return " ".join(parts) + "."


def _json_request(style: int, held: dict[str, Any], text: str) -> str:
    """The request with the keys named in one of four ways."""
    names = ", ".join(held)
    if style == 0:
        return f"Extract JSON with the keys {names}.\n{text}"
    if style == 1:
        return f"{text}\nGive me this as JSON with {names}."
    types = {str: "string", int: "integer", bool: "boolean"}
    if style == 2:
        properties = {key: {"type": types[type(item)]} for key, item in held.items()}
        schema = {"type": "object", "properties": properties}
        return f"Fill this schema: {json.dumps(schema)}\n{text}"
    return f"Return a JSON object with these fields: {names}\nText: {text}"
