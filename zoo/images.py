"""Pictures of 96 x 96 pixels with exact answers: coloured shapes, and numbers of 1 to 4 digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from chat import Conversation, Message, reply

SIZE = 96
COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220),
    "yellow": (240, 210, 40), "purple": (140, 50, 170), "orange": (245, 135, 30),
    "pink": (245, 130, 180), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "ring", "cross")
PLACES = (
    "top left", "top", "top right", "left", "centre", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
COUNTS = ("", "one", "two", "three", "four")
GLYPHS = (  # five columns by seven rows, a row a number of five bits
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14), (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8), (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class Picture:
    """Pixels [96, 96, 3], what stands in each cell of the 3 x 3 grid, and the number if any."""

    pixels: Pixels
    cells: dict[int, tuple[str, str]] = field(default_factory=dict)  # place -> (shape, colour)
    number: str = ""


def _mask(shape: str, y: int, x: int, radius: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which pixels a shape covers, its centre at (y, x)."""
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    down, right = rows - y, columns - x
    distance = np.hypot(down, right)
    box = (np.abs(down) <= radius) & (np.abs(right) <= radius)
    if shape == "circle":
        return distance <= radius
    if shape == "ring":
        return (distance <= radius) & (distance >= 0.55 * radius)
    if shape == "square":
        return (np.abs(down) <= 0.85 * radius) & (np.abs(right) <= 0.85 * radius)
    if shape == "cross":
        thin = 0.33 * radius
        return box & ((np.abs(down) <= thin) | (np.abs(right) <= thin))
    return box & (np.abs(right) * 2 <= down + radius)


def _background(rng: Random) -> Pixels:
    """A light, slightly tinted, slightly noisy ground."""
    tint = [rng.randint(205, 255) for _ in range(3)]
    noise = np.random.default_rng(rng.randrange(2**32)).integers(-6, 7, (SIZE, SIZE, 3))
    return np.clip(np.array(tint) + noise, 0, 255).astype(np.uint8)


def _ink(rng: Random, colour: str) -> list[int]:
    return [min(255, max(0, part + rng.randint(-15, 15))) for part in COLOURS[colour]]


def shapes(rng: Random, kinds: list[tuple[str, str]]) -> Picture:
    """A picture with one shape of each kind, every one in a cell of its own."""
    picture = Picture(_background(rng))
    for (shape, colour), cell in zip(kinds, rng.sample(range(9), len(kinds)), strict=True):
        radius = rng.randint(9, 15)
        y = 16 + 32 * (cell // 3) + rng.randint(-3, 3)
        x = 16 + 32 * (cell % 3) + rng.randint(-3, 3)
        picture.pixels[_mask(shape, y, x, radius)] = _ink(rng, colour)
        picture.cells[cell] = (shape, colour)
    return picture


def number(rng: Random, text: str) -> Picture:
    """A picture of a number, written with a font of blocks."""
    picture = Picture(_background(rng), number=text)
    wide = rng.choice([s for s in (2, 3, 4, 5) if (6 * len(text) - 1) * s <= SIZE - 6])
    high = rng.choice([s for s in (2, 3, 4, 5, 6) if wide <= s <= wide + 2])
    top = rng.randint(2, SIZE - 7 * high - 2)
    left = rng.randint(2, SIZE - (6 * len(text) - 1) * wide - 2)
    ink = _ink(rng, rng.choice(("black", "blue", "red", "purple", "green")))
    for i, digit in enumerate(text):
        bits = np.array([[row >> (4 - c) & 1 for c in range(5)] for row in GLYPHS[int(digit)]])
        glyph = np.kron(bits, np.ones((high, wide), int)).astype(bool)
        at = left + 6 * wide * i
        picture.pixels[top : top + 7 * high, at : at + 5 * wide][glyph] = ink
    return picture


def _kind(rng: Random) -> tuple[str, str]:
    return rng.choice(SHAPES), rng.choice(list(COLOURS))


def draw(rng: Random, kind: str = "") -> Picture:
    """A picture of one kind: `one`, `same`, `two` (shapes) or `number`."""
    kind = kind or rng.choices(("one", "same", "two", "number"), (3, 2, 2, 5))[0]
    if kind == "number":
        return number(rng, "".join(str(rng.randrange(10)) for _ in range(rng.randint(1, 4))))
    if kind == "two":
        first, second = _kind(rng), _kind(rng)
        while second[0] == first[0] or second[1] == first[1]:
            second = _kind(rng)
        return shapes(rng, [first, second])
    return shapes(rng, [_kind(rng)] * (1 if kind == "one" else rng.randint(1, 4)))


def questions(rng: Random, picture: Picture) -> dict[str, tuple[str, str]]:
    """(question, answer) by task, for everything that can be asked about a picture."""
    if picture.number:
        ask = ("Which number is in the picture?", "Read the number.", "What number do you see?")
        return {"number": (rng.choice(ask), picture.number)}
    held = list(picture.cells.items())
    place, (shape, colour) = held[0]
    if len({kind for _, kind in held}) == 2:
        place, (shape, colour) = rng.choice(held)
        return {
            "colour": (f"What colour is the {shape}?", colour),
            "shape": (f"Which shape is {colour}?", shape),
            "position": (f"Where is the {shape}?", PLACES[place]),
            "count": (rng.choice(COUNT_FORMS), "two"),
        }
    plural = len(held) > 1
    colours = ("What colour are the shapes?", "Which colour do the shapes have?")
    one = ("What colour is the shape?", "Which colour is the shape?", "What colour is it?")
    made = {
        "colour": (rng.choice(colours if plural else one), colour),
        "shape": (rng.choice(MANY_FORMS if plural else ONE_FORMS), shape),
        "count": (rng.choice(COUNT_FORMS), COUNTS[len(held)]),
    }
    if not plural:
        article = "an" if colour == "orange" else "a"
        made["position"] = (rng.choice(WHERE_FORMS).format(shape), PLACES[place])
        made["describe"] = (rng.choice(SEE_FORMS), f"{article} {colour} {shape}")
    return made


COUNT_FORMS = ("How many shapes are there?", "Count the shapes.", "How many shapes do you see?")
ONE_FORMS = ("Which shape is it?", "What shape is in the picture?", "Name the shape.")
MANY_FORMS = ("Which shapes are they?", "What kind of shape do you see?", "Name the kind of shape.")
WHERE_FORMS = ("Where is the {}?", "Where is the shape?", "Where in the picture is the {}?")
SEE_FORMS = ("What do you see?", "What is in the picture?", "Describe the picture.")


def _with_image(text: str) -> Message:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}


def dialogue(rng: Random, picture: Picture, task: str = "") -> Conversation:
    """Questions about one picture; with `task` a single one of that kind."""
    asked = list(questions(rng, picture).items())
    rng.shuffle(asked)
    if task:
        asked = [(name, pair) for name, pair in asked if name == task]
    messages: list[Message] = []
    for _, (question, answer) in asked:
        messages.append(
            {"role": "user", "content": question} if messages else _with_image(question)
        )
        messages.append(reply(answer))
    return Conversation(messages, task=task)


EVALUATIONS = (
    "colour", "shape", "count", "position", "describe", "colour-of-two", "shape-of-two",
    "digits1", "digits2", "digits3",
)  # fmt: skip


def evaluation(task: str, seed: int) -> tuple[Picture, Conversation]:
    """One held-out item."""
    rng = Random(f"held-out/picture/{task}/{seed}")
    if task.startswith("digits"):
        text = "".join(str(rng.randrange(10)) for _ in range(int(task[6:])))
        return (picture := number(rng, text)), dialogue(rng, picture, "number")
    if task.endswith("-of-two"):  # which of the two is meant has to be found first
        return (picture := draw(rng, "two")), dialogue(rng, picture, task.partition("-")[0])
    kinds = {"describe": ("one",), "position": ("one",), "count": ("one", "same", "two")}
    picture = draw(rng, rng.choice(kinds.get(task, ("one", "same"))))
    return picture, dialogue(rng, picture, task)
