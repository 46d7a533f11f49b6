"""Long prompts: needles and chains of variables hidden in a text, and LongBench's files."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher

from radixlm.base.errors import ConfigError
from radixlm.evals.items import (
    Grade,
    Item,
    Reply,
    Task,
    TaskOptions,
    fields_of,
    read_rows,
    read_text,
)

_TEXTS = 5  # of each length, with several needles
_CITIES = "Oslo Lima Rome Cairo Kyoto Quito Delhi Accra Paris Hanoi Seoul Tunis".split()
_SUBJECTS = "The baker,A gardener,The old clock,A small boat,The teacher,Our neighbour".split(",")
_VERBS = "waits near,looks at,walks past,remembers,paints,talks about".split(",")
_OBJECTS = "the river,a quiet street,the market,an open window,the hill,a red door".split(",")


def needle(options: TaskOptions) -> Task:
    """Find a number that one sentence of a long text tells. `--lengths` in words, `--depths` in
    percent of the text, `--num-needles` for each pair; --data-path: a text to hide them in."""
    if any(not 0 <= depth <= 100 for depth in options.depths):
        raise ConfigError("--depths: between 0 (at the start) and 100 (at the end)")
    given = _given(options, 1)
    items = []
    for length in options.lengths:
        for depth in options.depths:
            for number in range(options.num_needles):
                draw = random.Random(f"{options.seed}/{length}/{depth}/{number}")
                city, code = draw.choice(_CITIES), str(draw.randrange(1000, 10000))
                sentences = _sentences(draw, length, given)
                sentences.insert(len(sentences) * depth // 100, f"The code for {city} is {code}.")
                question = f"{' '.join(sentences)}\n\nWhat is the code for {city}?"
                name = f"{length}-{depth}-{number}"
                items.append(Item(name, question, code, group=f"{length} words, depth {depth}%"))
    return Task(items, _grade_needle, 32)


def multi_needle(options: TaskOptions) -> Task:
    """Find `--num-needles` numbers in a text: the share of them that the answer has."""
    items = []
    for draw, name, length, sentences in _texts(options, len(_CITIES)):
        codes = {
            city: str(draw.randrange(1000, 10000))
            for city in draw.sample(_CITIES, options.num_needles)
        }
        hidden = [f"The code for {city} is {code}." for city, code in codes.items()]
        asked = ", ".join(draw.sample(list(codes), len(codes)))
        question = f"{_spread(sentences, hidden)}\n\nWhat are the codes for {asked}?"
        items.append(Item(name, question, list(codes.values()), group=f"{length} words"))
    return Task(items, _grade_share, 32 * options.num_needles)


def variable_tracking(options: TaskOptions) -> Task:
    """Name the variables of a chain of `--num-needles` assignments, spread over a text, which all
    have one value (RULER's variable tracking, arXiv:2404.06654): the share of them in the answer.
    """
    items = []
    for draw, name, length, sentences in _texts(options, 26):
        value = str(draw.randrange(10000, 100000))
        letters = draw.sample(string.ascii_uppercase, options.num_needles)
        names = [f"{letter}{draw.randrange(100, 1000)}" for letter in letters]
        values = [value, *(f"VAR {one}" for one in names)]
        hidden = [f"VAR {one} = {of}." for one, of in zip(names, values, strict=False)]
        question = (
            f"{_spread(sentences, hidden)}\n\nWhich variables have the value {value}, directly or "
            "by another variable? Write their names."
        )
        items.append(Item(name, question, names, group=f"{length} words"))
    return Task(items, _grade_share, 32 * options.num_needles)


def _given(options: TaskOptions, most: int) -> str:
    """The text of --data-path, "" without. ``most``: for --num-needles if above 1."""
    if any(length < 20 for length in options.lengths) or options.num_needles < 1:
        raise ConfigError(
            "--lengths and --num-needles: lengths of 20 words or more, 1 needle or more"
        )
    if 1 < most < options.num_needles:
        raise ConfigError(f"--num-needles {options.num_needles}: at most {most} in a text")
    return "" if options.data_path is None else read_text(options.path("needle", "TEXT"))


def _texts(options: TaskOptions, most: int) -> Iterator[tuple[random.Random, str, int, list[str]]]:
    """Texts of each length: draws, name, length in words, sentences."""
    given = _given(options, most)
    for length in options.lengths:
        for number in range(_TEXTS):
            draw = random.Random(f"{options.seed}/{length}/{number}")
            yield draw, f"{length}-{number}", length, _sentences(draw, length, given)


def _spread(sentences: list[str], hidden: Sequence[str]) -> str:
    """A text with hidden sentences at even distances, the first of them first."""
    places = [len(sentences) * i // len(hidden) for i in range(len(hidden))]
    for place, one in reversed(list(zip(places, hidden, strict=True))):
        sentences.insert(place, one)
    return " ".join(sentences)


def _grade_share(item: Item, reply: Reply) -> Grade:
    found = [one for one in item.answer if one in reply.text]
    return Grade(len(found) / len(item.answer), found or None)


def _sentences(draw: random.Random, num_words: int, given: str) -> list[str]:
    """Sentences of about so many words: made up, or of the text from a drawn place, in a circle."""
    if given:
        known = [one for one in re.split(r"(?<=[.!?])\s+", given) if one.strip()]
        start = draw.randrange(len(known))
        order = (known[(start + i) % len(known)] for i in range(10**9))
    else:
        order = (
            f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}."
            for _ in range(10**9)
        )
    found: list[str] = []
    count = 0
    for sentence in order:
        found.append(sentence)
        count += len(sentence.split())
        if count >= num_words:
            break
    return found


def _grade_needle(item: Item, reply: Reply) -> Grade:
    found = re.findall(r"\d{4,}", reply.text)
    return Grade(float(item.answer in found), found[0] if found else None)


def _plain(text: str) -> list[str]:
    """Lower case, without punctuation and articles (SQuAD's normalisation)."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _f1(found: Sequence[str], want: Sequence[str]) -> float:
    common = sum((Counter(found) & Counter(want)).values())
    return 2 * common / (len(found) + len(want)) if common else 0.0


def _qa_f1(text: str, answer: str, _: Sequence[str]) -> float:
    return _f1(_plain(text), _plain(answer))


def _qa_f1_zh(text: str, answer: str, _: Sequence[str]) -> float:
    return _f1("".join(_plain(text)), "".join(_plain(answer)))


def _rouge_l(text: str, answer: str, _: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words (characters of Chinese)."""
    is_spaced = " " in answer.strip()
    a, b = (text.split(), answer.split()) if is_spaced else (list(text), list(answer))
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b)) if row[-1] else 0.0


def _classification(text: str, answer: str, classes: Sequence[str]) -> float:
    matches = [one for one in classes if one in text]
    matches = [one for one in matches if one == answer or one not in answer]
    return 1 / len(matches) if answer in matches else 0.0


def _share_of_numbers(text: str, answer: str, _: Sequence[str]) -> float:
    want = re.findall(r"\d+", answer)
    found = re.findall(r"\d+", text)
    return found.count(want[0]) / len(found) if found and want else 0.0


def _code(text: str, answer: str, _: Sequence[str]) -> float:
    lines = [line for line in text.lstrip("\n").split("\n") if not re.search(r"[`#]|//", line)]
    return SequenceMatcher(None, lines[0] if lines else "", answer, autojunk=False).ratio()


Metric = Callable[[str, str, Sequence[str]], float]
METRICS: dict[str, Metric] = {
    **dict.fromkeys("narrativeqa qasper multifieldqa_en triviaqa".split(), _qa_f1),
    **dict.fromkeys("hotpotqa 2wikimqa musique".split(), _qa_f1),
    "multifieldqa_zh": _qa_f1_zh,
    **dict.fromkeys("gov_report qmsum multi_news vcsum samsum dureader".split(), _rouge_l),
    **dict.fromkeys("trec lsht".split(), _classification),
    **dict.fromkeys("passage_retrieval_en passage_retrieval_zh".split(), _share_of_numbers),
    "passage_count": _share_of_numbers,
    **dict.fromkeys("lcc repobench-p".split(), _code),
}  # fmt: skip
_FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}


def longbench(options: TaskOptions) -> Task:
    """JSON lines of `context`, `input`, `answers` and `dataset` (whose metric is used), or the
    questions of LongBench v2 (`question`, `choice_A` to `choice_D`, `answer`). A name in {braces}
    of `--prompt-template` is a field of the line."""
    path = options.path("longbench", "FILE.jsonl")
    rows = read_rows(path)
    if "choice_A" in rows[0]:
        return _second(options, rows)
    template = options.prompt_template or "{context}\n\n{input}"
    items = []
    names = ("context", "input", "answers", "dataset")
    for i, (_, _, answers, dataset) in enumerate(fields_of(rows, path, *names)):
        dataset = dataset.removesuffix("_e")
        if dataset not in METRICS:
            raise ConfigError(f"{path}: line {i + 1}: unknown dataset {dataset!r}")
        want = {"answers": answers, "classes": rows[i].get("all_classes") or []}
        items.append(Item(str(i), _filled(template, rows[i]), want, group=dataset))
    return Task(items, _grade_longbench, 512)


def _filled(template: str, row: dict[str, object]) -> str:
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"--prompt-template: {error}; fields: {', '.join(row)}") from error


def _second(options: TaskOptions, rows: Sequence[dict[str, object]]) -> Task:
    template = options.prompt_template or (
        "{context}\n\n{question}\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n"
        "(D) {choice_D}\n\nEnd with a line of the form 'Answer: X', where X is A, B, C or D."
    )
    items = [
        Item(str(i), _filled(template, row), str(row["answer"]), str(row.get("length") or ""))
        for i, row in enumerate(rows)
    ]
    return Task(items, _grade_letter, 512)


def _grade_letter(item: Item, reply: Reply) -> Grade:
    found = re.findall(r"(?i:answer\s*(?:is|:))\s*\**\(?([A-D])\b", reply.text)
    return Grade(float(found[-1] == item.answer), found[-1]) if found else Grade(0.0)


def _grade_longbench(item: Item, reply: Reply) -> Grade:
    text = reply.text.strip()
    if item.group in _FIRST_LINE:
        text = text.split("\n")[0]
    metric, classes = METRICS[item.group], item.answer["classes"]
    score = max((metric(text, answer, classes) for answer in item.answer["answers"]), default=0.0)
    return Grade(score, text or None)
