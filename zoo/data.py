"""The curriculum: an endless, seeded stream of conversations with exact answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

import assist
import tasks
import tools
from chat import Conversation, Message, render, reply, train_tokenizer, user
from passages import extract, growing, passage, remember
from wording import BLIND_WORDING, HELD_OUT, TRAINING, VALIDATION, Wording

THINKING = 0.2  # share of the short documents in which the model thinks
COLUMNS = ((tasks.add, 1.0), (tasks.subtract, 3.0))  # what thinking helps most, and how much
HELP = 26.0  # weight of the questions about RadixLM beside those of tasks.SHORT
BUCKETS = {"short": 256, "middle": 512, "long": 1536}  # tokens a packed row


def short(rng: Random, thinking: float = THINKING) -> Conversation:
    """One to four short tasks in a row, some of them with thinking."""
    pick = rng.random()
    if pick < 0.05:
        return remember(rng, TRAINING)
    if pick < 0.11:
        return passage(rng, rng.randint(1, 10), 1, 0.8, TRAINING)
    if pick < 0.14:
        return growing(rng, rng.randint(1, 4), wording=TRAINING)
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(tools.SYSTEMS)})
    table = [*tasks.SHORT.values(), (assist.ask, HELP)]
    think = rng.random() < thinking
    if think and rng.random() < 0.7:
        table = list(COLUMNS)
    turns = 1 if think else rng.choice((1, 2, 3, 4))
    for _ in range(turns):
        task, _weight = rng.choices(table, [weight for _, weight in table])[0]
        question, answer, thought = task(rng, wording=TRAINING)
        messages += [user(question), reply(answer, thought if think else "")]
    return Conversation(messages, task="short")


def middle(rng: Random) -> Conversation:
    """Tools, JSON, and passages of a few hundred tokens."""
    pick = rng.random()
    if pick < 0.58:
        return tools.dialogue(rng, rng.choice((1, 2, 3, 4)), invented=0.3, wording=TRAINING)
    if pick < 0.73:
        return extract(rng, TRAINING)
    if pick < 0.78:
        return growing(rng, rng.randint(3, 9), rng.randint(2, 5), TRAINING)
    if pick < 0.88:
        return passage(rng, rng.randint(3, 30), 1, 1.0, TRAINING)
    return passage(rng, rng.randint(2, 22), rng.randint(6, 12), 0.4, TRAINING)


def long(rng: Random) -> Conversation:
    """A passage of 500 to 1,500 tokens with many questions."""
    if rng.random() < 0.5:
        return growing(rng, rng.randint(10, 16), 8, TRAINING)
    return passage(rng, rng.randint(40, 100), rng.randint(12, 20), 0.7, TRAINING)


BUCKET_MAKERS = {"short": short, "middle": middle, "long": long}


def stream(bucket: str, seed: int) -> Iterator[Conversation]:
    """Endless conversations for one row length."""
    rng = Random(f"{bucket}/{seed}")
    while True:
        yield BUCKET_MAKERS[bucket](rng)


def evaluation(task: str, seed: int) -> Conversation:
    """One held-out item; its last assistant turn is the answer."""
    rng = Random(f"held-out/{task}/{seed}")
    edition, _, kind = task.partition("-")
    if edition in EDITIONS:
        return reworded(rng, kind, EDITIONS[edition])
    if task.endswith("-think"):
        base = evaluation(task.removesuffix("-think"), seed)
        return Conversation(base.messages, base.tools, task)
    if task[:3] in ("add", "sub") and task[3:].isdigit():
        make = tasks.add if task.startswith("add") else tasks.subtract
        question, answer, _ = make(rng, int(task[3:]))
        return Conversation([user(question), reply(answer)], task=task)
    if task in ("passage", "passage-long"):
        facts = rng.randint(5, 30) if task == "passage" else rng.randint(60, 100)
        return Conversation(passage(rng, facts, 1).messages, task=task)
    if task == "json":
        made = extract(rng)
        return Conversation(made.messages, task=task)
    if task.startswith("tool-"):
        return tools.dialogue(rng, 1, task.removeprefix("tool-"))
    if task == "memory":
        return remember(rng)
    question, answer, _ = tasks.SHORT[task][0](rng)
    return Conversation([user(question), reply(answer)], task=task)


def reworded(rng: Random, kind: str, wording: Wording) -> Conversation:
    """An item of the second edition, in phrasings that no training item has."""
    if kind.startswith("tool-"):
        return tools.dialogue(rng, 1, kind.removeprefix("tool-"), wording=wording)
    if kind in ("passage", "json", "memory"):
        made = {
            "passage": lambda: passage(rng, rng.randint(5, 30), 1, wording=wording),
            "json": lambda: extract(rng, wording),
            "memory": lambda: remember(rng, wording),
        }[kind]()
        return Conversation(made.messages, task=kind)
    make = assist.ask if kind == "help" else tasks.SHORT[kind][0]
    question, answer, _ = make(rng, wording=wording)
    return Conversation([user(question), reply(answer)], task=kind)


EVALUATIONS = (
    "add2 sub2 add3 sub3 add2-think sub2-think add3-think sub3-think copy quote passage "
    "passage-long json tool-one tool-two tool-none tool-missing "
    "memory reverse sort upper lower spell count multiply compare capital python greet refuse"
).split()

EDITIONS = {"new": HELD_OUT, "blind": BLIND_WORDING, "check": VALIDATION}  # first words of rows
REWORDED = tuple(
    f"new-{kind}"
    for kind in (*tasks.SHORT, "help", "passage", "json", "memory", *("tool-one", "tool-two"),
                 "tool-none", "tool-missing")
)  # fmt: skip
UNSEEN = tuple(
    f"blind-{kind}"
    for kind in ("add subtract multiply compare copy json passage tool-one tool-missing memory "
                 "greet help refuse").split()
)  # fmt: skip


CHECKS = tuple(
    f"check-{kind}" for kind in "add subtract copy json help refuse tool-one tool-two greet".split()
)  # validation: what the choice among weights is made by


def build_tokenizer(path: Path, num_documents: int = 12000) -> None:
    """Train the tokenizer on the curriculum's own text."""
    texts = []
    for bucket in ("short", "middle"):
        source = stream(bucket, 7)
        share = num_documents * (4 if bucket == "short" else 1) // 5
        texts += [render(next(source)) for _ in range(share)]
    path.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts).save(str(path))


def main() -> None:
    """Print samples, or train the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="train a tokenizer and write it here")
    parser.add_argument("--show", choices=list(BUCKETS), help="print samples of this row length")
    args = parser.parse_args()
    if args.tokenizer:
        build_tokenizer(args.tokenizer)
    if args.show:
        source = stream(args.show, 1)
        for _ in range(5):
            print(render(next(source)), end="\n----\n")


if __name__ == "__main__":
    main()
