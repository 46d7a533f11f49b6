"""``radixlm completion SHELL``: a script that completes verbs, flags and their values.

bash   eval "$(radixlm completion bash)"
zsh    eval "$(radixlm completion zsh)"
fish   radixlm completion fish | source

It takes some seconds: a start-up file of a shell should read a file to which it was written.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.config.option import options
from radixlm.config.verb_parser import unmarked

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_OWN_WORDS = {"completion": SHELLS, "models": ("rm",), "lora": ("inspect",)}


def main(argv: list[str]) -> int:
    """Print the script."""
    if argv in (["-h"], ["--help"]):
        print(unmarked(__doc__))
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"completion: name one shell: {', '.join(SHELLS)}")
    verbs: dict[str, tuple[str, str]] = load("radixlm.entrypoints.cli:VERBS")
    own = _OWN_WORDS | {"bench": tuple(load("radixlm.bench.cli:VERBS"))}
    words = {verb: sorted(flags_of(verb, target)) for verb, (target, _) in verbs.items()}
    words = {verb: [*own.get(verb, ()), *flags] for verb, flags in words.items()}
    texts = {verb: text for verb, (_, text) in verbs.items()}
    script = _fish(words, texts) if argv[0] == "fish" else _bash(words)
    print(("autoload -Uz bashcompinit && bashcompinit\n" if argv[0] == "zsh" else "") + script)
    return 0


def flags_of(verb: str, target: str) -> set[str]:
    """The flags that the verb's help names; of one with a server's options, all of them."""
    if verb in ("completion", "version"):
        return set()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        load(target)(["--help"])
    text, flags = out.getvalue(), set(_FLAG.findall(out.getvalue()))
    if "--help-all" in flags or "erver options" in text:
        flags |= {option.dashed for option in options().values()}
    return flags


def choices() -> dict[str, tuple[str, ...]]:
    """The values of flags that have a fixed set."""
    return {
        option.dashed: tuple(map(str, option.flag.allowed))
        for option in options().values()
        if option.flag.allowed
    }


def _bash(words: dict[str, list[str]]) -> str:
    values = "\n".join(
        f"    {flag}) words={shlex.quote(' '.join(allowed))}; is_value=1;;"
        for flag, allowed in choices().items()
    )
    verbs = "\n".join(
        f"    {verb}) words={shlex.quote(' '.join(flags))};;" for verb, flags in words.items()
    )
    return f"""_radixlm() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local words="" is_value=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word")); return
  fi
  case "$before" in
{values}
  esac
  if [ -n "$is_value" ]; then COMPREPLY=($(compgen -W "$words" -- "$word")); return; fi
  case "${{COMP_WORDS[1]}}" in
{verbs}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _radixlm radixlm"""


def _fish(words: dict[str, list[str]], texts: dict[str, str]) -> str:
    values = choices()
    lines = ["complete -c radixlm -e"]
    for verb, flags in words.items():
        text = shlex.quote(texts[verb])
        lines.append(f"complete -c radixlm -f -n __fish_use_subcommand -a {verb} -d {text}")
        where = f"-n '__fish_seen_subcommand_from {verb}'"
        for flag in flags:
            if not flag.startswith("--"):
                lines.append(f"complete -c radixlm {where} -a {flag}")
                continue
            of_flag = values.get(flag)
            given = f" -x -a {shlex.quote(' '.join(of_flag))}" if of_flag else ""
            lines.append(f"complete -c radixlm {where} -l {flag.removeprefix('--')}{given}")
    return "\n".join(lines)
