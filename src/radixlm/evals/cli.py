"""`radixlm eval TASK`: accuracy of a server, or of a model in this process.

Without --url the model runs here, and the other options are those of the server.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import uvloop

from radixlm.base.errors import ConfigError
from radixlm.bench import report
from radixlm.bench.offline import engine_options
from radixlm.bench.options import json_object, positive, refuse
from radixlm.config.verb_parser import TableHelp, VerbParser
from radixlm.entrypoints.offline import Engine
from radixlm.evals.ask import Asking, EngineModel, HttpModel, Model
from radixlm.evals.items import Item, Task, TaskOptions, read_rows
from radixlm.evals.run import Answered, Settings, answer_all, chosen, details, summarise
from radixlm.evals.statistics import compare
from radixlm.evals.tasks import TASKS, load_task

_WHOLE = (  # flag, other names, field's default, help
    ("--num-shots", (), None, "examples before each question (gsm8k: 5)"),
    ("--limit", ("--num-questions", "--num-examples"), None, "ask the first N items"),
    ("--seed", (), 0, "of draws, intervals and sampling"),
    ("--num-needles", (), 4, "needles for each length and depth; of multi-needle, in each text"),
    ("--num-samples", ("--repeat",), 1, "ask each item N times; gives pass@k"),
)
_THINKING = (
    "give what the chat template reads: "
    '--extra-request-body \'{"chat_template_kwargs": {"enable_thinking": true}}\''
)


def build_parser() -> VerbParser:
    """All flags of this verb."""
    listed = "\n".join(f"  {name:<17} {text}" for name, (_, text) in TASKS.items())
    parser = VerbParser(
        "radixlm eval",
        "How right the answers of a model are.",
        usage="radixlm eval [TASK] [--url URL] [options] [server options]",
        epilog=f"tasks:\n{listed}".replace("%", "%%"),
        formatter_class=TableHelp,
    )
    parser.add_argument("--eval-name", metavar="TASK", help="as TASK; bundled without both")
    _add_model(parser)
    _add_items(parser)
    _add_asking(parser)
    refuse(parser, {"--thinking-mode": _THINKING})
    group = parser.add_argument_group("results")
    group.add_argument("--output-file", metavar="FILE", help="append a line of JSON")
    group.add_argument("--details", metavar="FILE", help="write a line of JSON for each item")
    group.add_argument("--json", action="store_true", help="print JSON instead of lines")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (without a URL: in this process)")
    group.add_argument("--url", "--base-url", metavar="URL", help="a server of OpenAI's API")
    group.add_argument("--host", help="of the server, instead of --url")
    group.add_argument("--port", type=int, metavar="N", help="of the server, instead of --url")
    group.add_argument("--model", metavar="NAME", help="of a server (its first), or a folder")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--against",
        metavar="URL",
        help="ask this server too (or read a file of --details), and say if the difference is real",
    )


def _add_items(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("items")
    group.add_argument("--data-path", metavar="PATH", help="the task's file or folder")
    group.add_argument("--shots-path", metavar="FILE", help="examples of gsm8k (training file)")
    for flag, others, default, text in _WHOLE:
        group.add_argument(flag, *others, type=int, default=default, metavar="N", help=text)
    group.add_argument("--shuffle", action="store_true", help="draw the items of --limit by --seed")
    group.add_argument(
        "--method",
        choices=("generate", "likelihood"),
        default="generate",
        help="mmlu, gpqa: read the written answer, or take the likeliest letter",
    )
    group.add_argument("--language", metavar="A,B", help="languages of mgsm")
    group.add_argument("--group", metavar="A,B", help="subjects of mmlu, tasks of bundled")
    group.add_argument(
        "--prompt-template", metavar="TEXT", help="of longbench: '{context} {input}'"
    )
    many: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    group.add_argument("--lengths", default=(500, 1000, 2000), help="needle: words", **many)
    group.add_argument("--depths", default=(0, 25, 50, 75, 100), help="needle: percent", **many)
    group.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval: run what the model writes"
    )
    group.add_argument(
        "--code-timeout-s", type=float, default=3.0, metavar="S", help="of a program"
    )


def _add_asking(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--api",
        choices=("auto", "chat", "completions"),
        default="auto",
        help="auto: completions for examples and likelihoods, else chat",
    )
    group.add_argument(
        "--multi-turn-shots", action="store_true", help="examples as turns of a chat"
    )
    group.add_argument("--system-prompt", metavar="TEXT", help="first message of a chat")
    group.add_argument(
        "--max-tokens", "--max-new-tokens", type=int, metavar="N", help="(default: the task's)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="of the server when unset")
    group.add_argument("--reasoning-effort", metavar="WORD", help="field of a chat")
    group.add_argument("--extra-request-body", metavar="JSON", help="fields of every request")
    group.add_argument(
        "--num-threads", "--parallel", type=int, default=64, metavar="N", help="requests at once"
    )


def main(argv: Sequence[str]) -> int:
    """0, or 1 if a request failed."""
    parser = build_parser()
    task_name, words = _task_word(argv)
    args, rest = parser.parse_known_args(words)
    report.check_writable(args.output_file)
    report.check_writable(args.details, "--details")
    for flag, value in (("--num-threads", args.num_threads), ("--num-samples", args.num_samples)):
        positive([value], flag)
    positive([args.limit] if args.limit is not None else [], "--limit")
    if args.num_samples > 1 and args.temperature <= 0:
        raise ConfigError("--num-samples: equal answers at --temperature 0; try --temperature 0.8")
    if task_name and args.eval_name:
        raise ConfigError(f"two tasks: {task_name} and --eval-name {args.eval_name}; give one")
    name = task_name or args.eval_name or "bundled"
    url = _url(args)
    if url is not None and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    task = load_task(
        name, TaskOptions(**{f.name: getattr(args, f.name) for f in fields(TaskOptions)})
    )
    settings = _settings(args, task)
    items = chosen(task, args.limit, args.shuffle, args.seed)
    run = Run(args, name, task, items, settings)
    if url is not None:
        return int(uvloop.run(run.on(HttpModel(url, args.model, args.api_key), url)))
    if args.model is not None:  # the server's name of --model-path
        rest = ["--model-path", args.model, *rest]
    options = engine_options(rest, parser)
    if options.get("skip_tokenizer_init"):
        raise ConfigError("--skip-tokenizer-init: an eval needs the tokenizer")
    with Engine(**options) as engine:
        label = str(engine.get_server_info()["model_path"])
        return int(uvloop.run(run.on(EngineModel(engine), label)))


def _task_word(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the task, the other words): it is the first word, or the last one behind the options. A word
    elsewhere may be the value of a server's option."""
    words = list(argv)
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    if len(words) > 1 and words[-1] in TASKS and words[-2] not in ("--eval-name", "--model"):
        return words[-1], words[:-1]
    return None, words


def _url(args: argparse.Namespace) -> str | None:
    """The server's address, None for a model in this process."""
    if args.url is not None or (args.host is None and args.port is None):
        return None if args.url is None else str(args.url)
    host = args.host or "127.0.0.1"
    host = host if "://" in host else f"http://{host}"
    return f"{host.replace('0.0.0.0', '127.0.0.1')}:{args.port or 30000}"


def _settings(args: argparse.Namespace, task: Task) -> Settings:
    is_chat = task.is_chat if args.api == "auto" else args.api == "chat"
    if is_chat and any(item.choices for item in task.items):
        raise ConfigError("--api chat: likelihoods are of texts; leave it out")
    if not is_chat and (args.system_prompt or args.multi_turn_shots):
        flag = "--system-prompt" if args.system_prompt else "--multi-turn-shots"
        raise ConfigError(f"{flag} is for a chat: add --api chat")
    fields: dict[str, Any] = {"temperature": args.temperature}
    fields["max_tokens"] = args.max_tokens or task.max_tokens
    if task.stop and not is_chat:
        fields["stop"] = list(task.stop)
    if args.top_p is not None:
        fields["top_p"] = args.top_p
    if args.reasoning_effort:
        fields["reasoning_effort"] = args.reasoning_effort
    fields |= json_object(args.extra_request_body, "--extra-request-body")
    return Settings(
        fields=fields,
        asking=Asking(is_chat, args.multi_turn_shots, args.system_prompt),
        num_parallel=args.num_threads,
        num_samples=args.num_samples,
        seed=args.seed,
        shows_progress=not args.disable_tqdm,
    )


class Run:
    """One evaluation, with its comparison if there is one."""

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        task: Task,
        items: Sequence[Item],
        settings: Settings,
    ) -> None:
        self._args, self._name, self._task = args, name, task
        self._items, self._settings = items, settings

    async def on(self, model: HttpModel | EngineModel, label: str) -> int:
        """The exit status after the model, and the one of --against, were asked."""
        args = self._args
        if isinstance(model, HttpModel):
            await model.reach()
        other = await self._other() if args.against else None
        result, answered = await self._one(model, label)
        results = [result]
        if args.details:
            lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in details(answered))
            Path(args.details).expanduser().write_text(lines, encoding="utf-8")
        if other is not None:
            scores = {one.item.id: one.score for one in answered}
            result["against"] = await self._against(scores, results, other)
        if args.output_file:
            report.append_jsonl(args.output_file, results)
        for one in results:
            sys.stdout.write(json.dumps(one, indent=2) + "\n" if args.json else render(one))
        return int(any(one["errors"] for one in results))

    async def _one(self, model: Model, label: str) -> tuple[dict[str, Any], list[Answered]]:
        settings = self._settings
        try:
            answered, seconds = await answer_all(model, self._task, self._items, settings)
        finally:
            model.close()
        for error in list(dict.fromkeys(r.error for a in answered for r in a.replies if r.error))[
            :5
        ]:
            sys.stderr.write(f"a request failed: {error}\n")
        about = {"task": self._name, "model": label, "seed": settings.seed}
        about["api"] = "chat" if settings.asking.is_chat else "completions"
        notes = {"notes": list(self._task.notes)} if self._task.notes else {}
        return about | summarise(answered, seconds, settings.seed) | notes, answered

    async def _other(self) -> HttpModel | dict[str, float]:
        """The server of --against, or the scores in its file: asked for before the run, which may
        take hours."""
        against = self._args.against
        if "://" not in against:
            rows = read_rows(Path(against).expanduser())
            return {str(row["id"]): row["score"] for row in rows}
        model = HttpModel(against, None, self._args.api_key)
        await model.reach()
        return model

    async def _against(
        self,
        scores: Mapping[str, float],
        results: list[dict[str, Any]],
        other: HttpModel | dict[str, float],
    ) -> dict[str, Any]:
        """The comparison with a server, whose result joins `results`, or with a file."""
        against = self._args.against
        if isinstance(other, HttpModel):
            result, answered = await self._one(other, against)
            results.append(result)
            other = {one.item.id: one.score for one in answered}
        names = [name for name in scores if name in other]
        if not names:
            raise ConfigError(f"--against {against}: holds none of these items")
        pairs = ([scores[name] for name in names], [other[name] for name in names])
        found = compare(*pairs, self._settings.seed)
        return asdict(found) | {"is_real": found.is_real, "sentence": found.sentence()}


def render(result: Mapping[str, Any]) -> str:
    """The lines for people; the first four as SGLang's few_shot_gsm8k prints them."""
    lines = [
        f"{result['task']}: {result['model']}",
        f"Accuracy: {result['accuracy']:.3f}",
        f"Invalid: {result['invalid']:.3f}",
        f"Latency: {result['latency']:.3f} s",
        f"Output throughput: {result['output_throughput']:.3f} token/s",
        f"95% interval: {result['low']:.3f} to {result['high']:.3f} "
        f"({result['interval']}, {result['num_items']} items)",
    ]
    if result["errors"]:
        lines.append(f"Failed requests: {result['errors']}")
    known = ("prompt_loose", "instructions_strict", "instructions_loose", "acc_norm", "had_network")
    names = [n for n in result if n in known or n.startswith("pass@")]
    lines += [f"{name}: {result[name]:.3f}" for name in names]
    lines += result.get("notes", ())
    if groups := result.get("groups"):
        rows = [
            (
                name or "-",
                f"{g['accuracy']:.3f}",
                f"{g['low']:.3f}",
                f"{g['high']:.3f}",
                g["num_items"],
            )
            for name, g in groups.items()
        ]
        lines.append(report.table(("", "accuracy", "low", "high", "items"), rows))
    if against := result.get("against"):
        lines.append(against["sentence"])
    return "\n".join(lines) + "\n"
