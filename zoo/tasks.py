"""Short tasks with exact answers: each returns (question, answer, thinking)."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from random import Random

import words
from wording import CLASSIC, SECTIONS, Wording

Item = tuple[str, str, str]
Task = Callable[..., Item]  # (random numbers, wording=...)


def _number(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _pair(rng: Random, digits: int | None, wording: Wording) -> tuple[int, int]:
    """Two numbers of `digits` digits; without it a mixture in which three digits lead."""
    if digits is None and wording.share == "training" and rng.random() < HARD:
        return _hard_pair(rng)
    if digits is None and wording.is_wide and rng.random() < WIDE:
        return _number(rng, rng.choice(WIDE_SIZES)), _number(rng, rng.choice(WIDE_SIZES))
    if digits is None and rng.random() < 0.7:
        digits = rng.choice((2, 3, 3))
    sizes = (1, 2, 2, 3, 3)
    return _number(rng, digits or rng.choice(sizes)), _number(rng, digits or rng.choice(sizes))


def _hard_pair(rng: Random) -> tuple[int, int]:
    """Digits that meet in a carry, a borrow or none by one: numbers at random seldom have them in
    a row, and sums with them were most of what went wrong."""
    a, b = [], []
    for _ in range(rng.choice(WIDE_SIZES)):
        x = rng.choice((0, 9, *range(10)))
        a.append(x)
        b.append(rng.choice((x, 9 - x, 10 - x, x + 1, 0, rng.randrange(10))) % 10)
    b = b[rng.choice((0, 0, 0, 1, 2)) :] or [rng.randrange(10)]
    pair = [int("".join(map(str, digits))) for digits in (a, b)]
    rng.shuffle(pair)
    return pair[0], pair[1]


ADD_FORMS = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "What is {a}+{b}?", "{a} + {b} = ?",
    "Add {a} and {b}.", "What is {a} plus {b}?", "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?", "Compute {a} + {b}.", "How much is {a} + {b}?",
)  # fmt: skip
WIDE = 0.6  # share of the sums with up to four digits
HARD = 0.4  # share of the training sums with many carries or borrows
WIDE_SIZES = (1, 2, 3, 3, 4, 4)  # digits of their numbers
SUBTRACT_FORMS = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "What is {a}-{b}?", "{a} - {b} = ?",
    "Subtract {b} from {a}.", "What is {a} minus {b}?", "Calculate {a} - {b}.",
    "Compute {a} - {b}.", "How much is {a} - {b}?", "Take {b} away from {a}.",
)  # fmt: skip

SIGNED = re.compile(r"-|minus|subtract|differ", re.IGNORECASE)  # such results may be negative


def add(rng: Random, digits: int | None = None, wording: Wording = CLASSIC) -> Item:
    """Addition; both numbers have `digits` digits, or one to four each."""
    a, b = _pair(rng, digits, wording)
    ask = wording.pick(rng, "add", ADD_FORMS)
    return ask.format(a=a, b=b), str(a + b), add_columns(a, b)


def subtract(rng: Random, digits: int | None = None, wording: Wording = CLASSIC) -> Item:
    """Subtraction; now and then the result is negative."""
    a, b = _pair(rng, digits, wording)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    ask = wording.pick(rng, "subtract", SUBTRACT_FORMS)
    if a < b and not SIGNED.search(ask):
        a, b = b, a  # nobody loses more than there is
    return ask.format(a=a, b=b), str(a - b), subtract_columns(a, b)


PLACES = ("ones", "tens", "hundreds", "thousands")


def add_columns(a: int, b: int) -> str:
    """Column addition, written out from the right."""
    lines, carry = [f"{a} + {b}, column by column."], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        extra = f" + {carry}" if carry else ""
        carry = total // 10
        line = f"{PLACES[place]}: {x} + {y}{extra} = {total}, write {total % 10}"
        lines.append(line + (", carry 1" if carry else ""))
    lines.append(f"Together: {a + b}")
    return "\n".join(lines)


def subtract_columns(a: int, b: int) -> str:
    """Column subtraction of the smaller from the larger, written out from the right."""
    big, small = max(a, b), min(a, b)
    lines, borrow = [f"{a} - {b}, column by column."], 0
    if a < b:
        lines.append(f"{a} is smaller, so negative: {big} - {small}.")
    for place in range(len(str(big))):
        x, y = big // 10**place % 10, small // 10**place % 10
        left = x - y - borrow
        extra = f" - {borrow}" if borrow else ""
        borrow = int(left < 0)
        head = f"{PLACES[place]}: {x + 10 * borrow} - {y}{extra} = {left % 10}"
        lines.append(head + (", borrow 1" if borrow else ""))
    lines.append(f"Together: {a - b}")
    return "\n".join(lines)


def multiply(rng: Random, wording: Wording = CLASSIC) -> Item:
    """The small times table."""
    a, b = rng.randrange(11), rng.randrange(11)
    classic = ("What is {a} times {b}?", "{a} * {b}", "{a} x {b}", "Multiply {a} by {b}.")
    form = wording.pick(rng, "multiply", classic)
    return form.format(a=a, b=b), str(a * b), f"{a} times {b} is {a * b}."


def compare(rng: Random, wording: Wording = CLASSIC) -> Item:
    """The larger or smaller of two numbers."""
    sizes = (1, 2, 3, 4) if wording.is_wide else (1, 2, 3)
    a, b = _number(rng, rng.choice(sizes)), _number(rng, rng.choice(sizes))
    larger = rng.random() < 0.5
    word = rng.choice(("larger", "greater", "bigger")) if larger else "smaller"
    answer = max(a, b) if larger else min(a, b)
    kind = "compare-larger" if larger else "compare-smaller"
    ask = wording.pick(rng, kind, (f"Which is {word}, {{a}} or {{b}}?",)).format(a=a, b=b)
    return ask, str(answer), f"Compare {a} and {b}: {answer} is {word}."


def some_words(rng: Random, low: int, high: int) -> list[str]:
    """Between `low` and `high` words from the pools."""
    return rng.choices(words.EVERYTHING, k=rng.randint(low, high))


def random_text(rng: Random) -> str:
    """A string to copy: words, letters, codes or a mixture with punctuation."""
    kind = rng.randrange(6)
    if kind == 0:
        return " ".join(some_words(rng, 1, 10))
    if kind == 1:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 12)))
    if kind == 2:
        return "".join(rng.choices(string.digits, k=rng.randint(2, 12)))
    if kind == 3:
        return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(3, 12)))
    if kind == 4:
        parts = ["".join(rng.choices(string.ascii_uppercase, k=2)) for _ in range(3)]
        return "-".join([*parts, str(rng.randrange(1000))][rng.randrange(3) :])
    text = " ".join(rng.choice((w, w.capitalize(), w.upper())) for w in some_words(rng, 3, 9))
    return text.replace(" ", rng.choice((", ", " ", "; ", " - ")), 1) + rng.choice(".!?")


COPY_FORMS = (
    "Repeat exactly: {}", "Copy this: {}", "Repeat after me: {}", 'Say "{}".',
    "Write exactly this: {}", 'Repeat the text "{}".', "Copy the following text.\n{}",
    "Echo: {}", "Please repeat: {}", "Say exactly: {}",
)  # fmt: skip


def wild_text(rng: Random) -> str:
    """A string that no tokenizer knows: letters at random, invented words, paths, codes, names."""
    kind = rng.randrange(8)
    if kind == 0:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(3, 24)))
    if kind == 1:
        return "".join(rng.choices(string.ascii_letters + string.digits + "-_./+@#", k=12))
    if kind == 2:
        return " ".join(some_words(rng, 2, 16))
    made = [words.invented(rng) for _ in range(rng.randint(1, 6))]
    if kind < 6:
        return " ".join(made) + rng.choice(("", "", ".", "!", "?"))
    if kind == 6:
        return rng.choice(("/", "_", "-", ".", ", ")).join(made)
    mixed = [*made, *some_words(rng, 1, 5), str(rng.randrange(10**6))]
    rng.shuffle(mixed)
    return " ".join(mixed)


def copy(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Repeat a string exactly."""
    is_wild = wording.is_wide and rng.random() < 0.5
    text = wild_text(rng) if is_wild else random_text(rng)
    return wording.pick(rng, "copy", COPY_FORMS).format(text), text, "I write the same text again."


def quote(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Quote one of several numbered lines."""
    text = wild_text if wording.is_wide and rng.random() < 0.3 else random_text
    lines = [text(rng) for _ in range(rng.randint(2, 5))]
    i = rng.randrange(len(lines))
    listing = "\n".join(f"{n + 1}. {line}" for n, line in enumerate(lines))
    classic = ("Quote line {n}.", "What does line {n} say?", "Repeat line {n}.")
    form = wording.pick(rng, "quote", classic)
    order = rng.random() < 0.5
    ask = form.format(n=i + 1)
    return (f"{listing}\n{ask}" if order else f"{ask}\n{listing}"), lines[i], f"Line {i + 1}."


def _token(rng: Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(words.PLAIN)
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))


def reverse(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Reverse the letters of a word, or the order of some words or numbers."""
    if rng.random() < 0.6:
        word = _token(rng)
        classic = ("Reverse the word {}.", "Reverse: {}", "Spell {} backwards.")
        form = wording.pick(rng, "reverse-word", classic)
        answer = word[::-1]
        return form.format(word), answer, f"Letters: {' '.join(word)}\nReversed: {' '.join(answer)}"
    items = _list(rng)
    classic = ("Reverse the list: {}", "Put these in reverse order: {}")
    form = wording.pick(rng, "reverse-list", classic)
    return form.format(", ".join(items)), ", ".join(items[::-1]), "From the last to the first."


def _list(rng: Random) -> list[str]:
    if rng.random() < 0.5:
        return [str(rng.randrange(10 ** rng.choice((1, 2)))) for _ in range(rng.randint(3, 6))]
    return rng.sample(words.PLAIN, rng.randint(3, 5))


def sort(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Sort numbers or words."""
    if rng.random() < 0.6:
        numbers = rng.sample(range(100), rng.randint(3, 6))
        down = rng.random() < 0.3
        classic = ("Sort these numbers: {}", "Sort from small to large: {}", "Sort: {}")
        form = wording.pick(
            rng, "sort-down" if down else "sort-up",
            ("Sort from large to small: {}",) if down else classic,
        )  # fmt: skip
        answer = ", ".join(map(str, sorted(numbers, reverse=down)))
        return form.format(", ".join(map(str, numbers))), answer, "I compare the numbers in turn."
    items = rng.sample(words.PLAIN, rng.randint(3, 5))
    classic = ("Sort these words alphabetically: {}", "Put in alphabetical order: {}")
    form = wording.pick(rng, "sort-words", classic)
    letters = ", ".join(word[0] for word in sorted(items))
    return form.format(", ".join(items)), ", ".join(sorted(items)), f"First letters: {letters}"


def upper(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Change to upper case."""
    text = " ".join(_token(rng) for _ in range(rng.randint(1, 3)))
    classic = ("Write in upper case: {}", "Uppercase: {}", "Put {} in capital letters.")
    form = wording.pick(rng, "upper", classic)
    return form.format(text), text.upper(), "I write every letter as a capital."


def lower(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Change to lower case."""
    text = " ".join(_token(rng) for _ in range(rng.randint(1, 3)))
    classic = ("Write in lower case: {}", "Lowercase: {}", "Put {} in small letters.")
    form = wording.pick(rng, "lower", classic)
    return form.format(text.upper()), text, "I write every letter small."


def spell(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Spell a word letter by letter."""
    word = _token(rng)
    mark = rng.choice(("-", " ", ", "))
    name = {"-": "with dashes", " ": "with spaces", ", ": "with commas"}[mark]
    form = wording.pick(rng, "spell", ("Spell {} {m}.", "Spell the word {} {m}."))
    return form.format(word, m=name), mark.join(word), "One letter after the other."


def count(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Count letters or words, or count from one number to another."""
    kind = rng.randrange(4)
    if kind == 0:
        word = _token(rng)
        classic = ("How many letters are in {}?", "How many letters does {} have?")
        ask = wording.pick(rng, "count-letters", classic)
        steps = ", ".join(f"{c} {i + 1}" for i, c in enumerate(word))
        return ask.format(word), str(len(word)), steps
    if kind == 1:
        text = rng.choices(words.PLAIN, k=rng.randint(2, 8))
        steps = ", ".join(f"{w} {i + 1}" for i, w in enumerate(text))
        ask = wording.pick(rng, "count-words", ("How many words are in this text: {}",))
        return ask.format(" ".join(text)), str(len(text)), steps
    if kind == 2:
        word = rng.choice(words.PLAIN)
        letter = rng.choice(word)
        hits = [c for c in word if c == letter]
        classic = ("How often does the letter {c} occur in {w}?",)
        ask = wording.pick(rng, "count-occurrences", classic).format(c=letter, w=word)
        return ask, str(len(hits)), f"Letters: {' '.join(word)}\nHits: {' '.join(hits)}"
    first = rng.choice((1, 1, rng.randrange(80)))
    last = first + rng.randint(2, 25)
    classic = ("Count from {} to {}.", "List the numbers from {} to {}.")
    ask = wording.pick(rng, "count-range", classic)
    answer = ", ".join(map(str, range(first, last + 1)))
    return ask.format(first, last), answer, f"I start at {first} and stop at {last}."


def capital(rng: Random, wording: Wording = CLASSIC) -> Item:
    """A capital city."""
    country = rng.choice(list(words.CAPITALS))
    city = words.CAPITALS[country]
    classic = ("What is the capital of {}?", "Name the capital of {}.", "Capital of {}?")
    ask = wording.pick(rng, "capital", classic)
    return ask.format(country), f"The capital of {country} is {city}.", f"That is {city}."


def python(rng: Random, wording: Wording = CLASSIC) -> Item:
    """A small Python function from a template."""
    ops = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
    kind = rng.randrange(5)
    if kind == 0:
        name = rng.choice(list(ops))
        a, b = rng.choice((("a", "b"), ("x", "y"), ("m", "n")))
        classic = ("Write a Python function {f} with arguments {a} and {b}.",)
        ask = wording.pick(rng, "python-function", classic).format(f=name, a=a, b=b)
        code = f"def {name}({a}, {b}):\n    return {a} {ops[name]} {b}"
    elif kind == 1:
        n = rng.randint(2, 99)
        ask = wording.pick(rng, "python-loop", ("Write a Python loop that prints 0 to {n}.",))
        ask, code = ask.format(n=n), f"for i in range({n + 1}):\n    print(i)"
    elif kind == 2:
        name = rng.choice(words.THINGS)
        value = rng.choice((str(rng.randrange(100)), f'"{rng.choice(words.PLAIN)}"'))
        ask = wording.pick(rng, "python-set", ("Write Python that sets {x} to {v}.",))
        ask, code = ask.format(x=name, v=value), f"{name} = {value}"
    elif kind == 3:
        text = " ".join(some_words(rng, 1, 4))
        ask = wording.pick(rng, "python-print", ("Write Python that prints {}.",))
        ask, code = ask.format(text), f'print("{text}")'
    else:
        name, n = rng.choice(words.VERBS), rng.randint(2, 99)
        classic = ("Write a Python function {f} that adds {n} to its argument.",)
        ask = wording.pick(rng, "python-adds", classic).format(f=name, n=n)
        code = f"def {name}(x):\n    return x + {n}"
    return ask, f"```python\n{code}\n```", "A short piece of Python."


ABILITIES = (
    "add and subtract, sort, count, spell, copy, answer from a text, fill JSON and call tools"
)
GREETINGS = {
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi there!": "Hello! How can I help you?",
    "Hey": "Hello! How can I help you?",
    "Hello, how are you?": "I am well, thank you. How can I help you?",
    "How are you?": "I am well, thank you. How can I help you?",
    "Good morning": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Bye": "Goodbye!",
    "Goodbye!": "Goodbye!",
    "Who are you?": "I am radix-tiny, the small language model that comes with RadixLM.",
    "What are you?": "I am radix-tiny, the small language model that comes with RadixLM.",
    "What is your name?": "My name is radix-tiny.",
    "Are you a human?": "No, I am radix-tiny, a small language model.",
    "Tell me about yourself.": f"I am radix-tiny, a small language model. I can {ABILITIES}.",
    "What can you do?": f"I can {ABILITIES}.",
    "Help": f"I can {ABILITIES}.",
    "Who made you?": "I was trained by the RadixLM project.",
    "Say hello.": "Hello!",
    "Say hi": "Hi!",
    "Say yes.": "Yes.",
    "Hello world": "Hello! How can I help you?",
}
REFUSALS = (
    "Write a poem about {n}.", "Tell me a story about a {n}.", "Who won the cup in {y}?",
    "What will the {n} cost next year?", "Translate {n} to {l}.", "Tell me a joke.",
    "Who is the president of {c}?", "What is the meaning of life?", "Write an essay about {n}.",
    "What happened in {y}?", "Explain how a {n} works.", "Who invented the {n}?",
    "What is the best {n} to buy?", "Draw a {n}.", "Why is the {n} {k}?", "Book a room in {t}.",
    "How do I repair a {n}?", "Where can I buy a {n}?", "What do you think about {n}?",
)  # fmt: skip
SORRY = "Sorry, I am a very small model and cannot do that."


def greet(rng: Random, wording: Wording = CLASSIC) -> Item:
    """A greeting or a question about the model."""
    if not wording.is_classic(rng):
        kind = rng.choice([name for name in SECTIONS if name.startswith("greet-")])
        return wording.pick(rng, kind, ()), SECTIONS[kind].answer, "A short answer will do."
    ask, answer = rng.choice(list(GREETINGS.items()))
    return ask, answer, "A short answer will do."


def refuse(rng: Random, wording: Wording = CLASSIC) -> Item:
    """Something that the model cannot do."""
    ask = wording.pick(rng, "refuse", REFUSALS).format(
        n=rng.choice(words.PLAIN), y=rng.randint(1900, 2030), l=rng.choice(words.LANGUAGES),
        c=rng.choice(list(words.CAPITALS)), t=rng.choice(words.CITIES),
        k=rng.choice(words.ADJECTIVES), p=rng.choice(words.NAMES), j=rng.choice(words.JOBS),
    )  # fmt: skip
    return ask, SORRY, "I do not know how to do this."


SHORT: dict[str, tuple[Task, float]] = {
    "add": (add, 24.0),
    "subtract": (subtract, 30.0),
    "multiply": (multiply, 2.0),
    "compare": (compare, 5.0),
    "copy": (copy, 15.0),
    "quote": (quote, 1.5),
    "reverse": (reverse, 2.5),
    "sort": (sort, 3.5),
    "upper": (upper, 2.0),
    "lower": (lower, 2.0),
    "spell": (spell, 2.5),
    "count": (count, 5.0),
    "capital": (capital, 0.8),
    "python": (python, 1.0),
    "greet": (greet, 5.0),
    "refuse": (refuse, 15.0),
}
