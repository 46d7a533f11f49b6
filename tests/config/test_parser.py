"""The command line and YAML: round trips, precedence, suggestions, errors."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.config.groups import GROUPS
from radixlm.config.option import Option, options
from radixlm.config.parser import build_parser, collect, parse
from radixlm.config.server_config import ServerConfig
from radixlm.config.values import bounds, is_within

PARSER = build_parser()


def texts() -> st.SearchStrategy[str]:
    """Text that a shell can pass and that does not mean "unset"."""
    return st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8).filter(
        lambda text: text != "None"
    )


def numbers(option: Option) -> st.SearchStrategy[Any]:
    """Numbers inside the option's interval."""
    low, high = bounds(option.flag.within or "[-1000, 1000)")
    high = low + 1000 if math.isinf(high) else high
    drawn: st.SearchStrategy[Any]
    drawn = (
        st.integers(int(low), int(high)) if option.kind is int else st.floats(low, high, width=32)
    )
    interval = option.flag.within or "[-1000, 1000]"
    return drawn.filter(lambda value: is_within(value, interval))


def items(option: Option) -> st.SearchStrategy[Any]:
    """Values of the option, or of each item of its tuple."""
    if option.flag.allowed:
        return st.sampled_from(option.flag.allowed)
    if option.flag.is_json:
        return st.sampled_from(['{"a": 1}', "{}", '{"b": ["c", null]}'])
    if option.kind is bool:
        return st.booleans()
    return texts() if option.kind is str else numbers(option)


def values(option: Option) -> st.SearchStrategy[Any]:
    """Values of the option as the config holds them."""
    if not option.is_many:
        return items(option)
    plain = items(option).filter(lambda item: not str(item).startswith("-") and item != "")
    return st.lists(plain, min_size=1, max_size=3).map(tuple)


def written(option: Option, value: Any) -> list[str]:
    """The option as command-line words."""
    if option.kind is bool and option.flag.const is None:
        return [option.dashed if value else "--no-" + option.dashed[2:]]
    if not option.is_many:
        return [f"{option.dashed}={value}"]
    if option.flag.is_repeatable:
        return [f"{option.dashed}={item}" for item in value]
    return [option.dashed, *(str(item) for item in value)]


@st.composite
def chosen(draw: st.DrawFn) -> dict[str, Any]:
    """Some options with values."""
    picked = draw(st.lists(st.sampled_from(list(options())), max_size=6, unique=True))
    return {name: draw(values(options()[name])) for name in picked}


@settings(max_examples=100, derandomize=True, deadline=None)
@given(chosen())
def test_options_survive_the_command_line(wanted: dict[str, Any]) -> None:
    argv = [word for name, value in wanted.items() for word in written(options()[name], value)]
    config, names = collect(PARSER.read(argv))
    assert {name: config.value(name) for name in wanted} == wanted
    assert config == ServerConfig().with_values(wanted)
    assert names == set(wanted)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chosen())
def test_keywords_and_flags_agree(wanted: dict[str, Any]) -> None:
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in wanted.items()}
    assert ServerConfig.from_kwargs(**lists) == ServerConfig().with_values(wanted)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(wanted=chosen())
def test_options_survive_yaml(
    tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    lists = {k.replace("_", "-"): list(v) if isinstance(v, tuple) else v for k, v in wanted.items()}
    path.write_text(yaml.safe_dump(lists, allow_unicode=True), encoding="utf-8")
    config, names = collect(PARSER.read(["--config", str(path)]))
    assert config == ServerConfig().with_values(wanted)
    assert names == set(wanted)


def config_file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = config_file(tmp_path, "port: 1\nhost: a\ntensor-parallel-size: 2\nlog_requests: true\n")
    config, names = parse([*file, "--port", "2", "--tp", "4", "--no-log-requests"])
    assert (config.serve.port, config.serve.host, config.parallel.tp_size) == (2, "a", 4)
    assert not config.observe.log_requests
    assert names == {"port", "host", "tp_size", "log_requests"}


def test_yaml_takes_mappings_lists_and_null(tmp_path: Path) -> None:
    text = """
    json-model-override-args: {rope_scaling: {factor: 2}}
    cuda_graph_bs: [1, 2]
    kernel: rms_norm=reference
    dtype: null
    prompt-tokens-buckets: [tse, 1000, 2, 8]
    """
    config, _ = parse(config_file(tmp_path, text))
    assert config.model.json_model_override_args == '{"rope_scaling": {"factor": 2}}'
    assert config.execute.cuda_graph_bs == (1, 2)
    assert config.execute.kernel == ("rms_norm=reference",)
    assert config.model.dtype == "auto"
    assert config.observe.prompt_tokens_buckets == ("tse", "1000", "2", "8")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse(config_file(tmp_path, "# nothing\n")) == (ServerConfig(), frozenset())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mem-fraction-sttic: 0.5", "did you mean 'mem-fraction-static'?"),
        ("port: many", "--port: 'many' is not an integer; a value that works: 30000"),
        ("port: true", "--port: True is not an integer"),
        ("served-model-name: yes", "--served-model-name: True is not a string"),
        ("page-size: {a: 1}", "--page-size: {'a': 1} is not an integer"),
        ("port: [", "is not YAML"),
        ("- port", "must hold lines such as 'port: 30000'"),
        ("1: 2", "must hold lines such as 'port: 30000'"),
        ("tp: 1\ntp-size: 2", "--tp-size is given twice"),
        ("port: 1\nhost: a\nport: 2", ":3: port is given twice; keep one line"),
        ("json-model-override-args: {a: 1, a: 2}", ":1: a is given twice"),
        ("lora-paths: &a [*a, {b: 1, b: 2}]", ":1: b is given twice"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config_file(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        parse(["--config", str(tmp_path / "nowhere")])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match=r"cannot read .*binary"):
        parse(["--config", str(tmp_path / "binary")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "3"], "--prot is unknown; did you mean '--port'?"),
        (["--enable-metric"], "--enable-metric is unknown; did you mean '--enable-metrics'?"),
        (["--completely-else=3"], "--completely-else is unknown"),
        (["model"], "unexpected argument 'model'"),
        (["--port"], "--port: expected one argument, such as --port 30000"),
        (["--port", "70000"], "'70000' is not in [0, 65535]; a value that works: 30000"),
        (["--port", "3.5"], "--port: '3.5' is not an integer"),
        (["--mem-fraction-static", "1"], "'1' is not in (0, 1); a value that works: 0.5"),
        (["--mem-fraction-static", "nan"], "'nan' is not a number"),
        (["--schedule-conservativeness", "inf"], "'inf' is not a number"),
        (["--tokenizer-worker-num", "0"], "'0' is not in [1, inf); a value that works: 1"),
        (["--dtype", "bfloat"], "--dtype: 'bfloat' is not one of auto, half, float16"),
        (["--dtype", "bfloat1"], "did you mean 'bfloat16'?"),
        (["--dtype", "fp8"], "for weights in fp8: --quantization fp8"),
        (["--json-model-override-args", "[1]"], "expected a JSON object, got list"),
        (["--json-model-override-args", "{"], "--json-model-override-args: not JSON"),
        (["--cuda-graph-bs", "1", "x"], "--cuda-graph-bs: 'x' is not an integer"),
        (["--tp", "2", "--config"], "--config: expected one argument"),
    ],
)
def test_errors_name_the_flag_and_a_value_that_works(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert message in str(caught.value)


def test_secrets_stay_out_of_errors_and_repr() -> None:
    config, _ = parse(["--api-key", "hunter2", "--admin-api-key=hunter3"])
    assert (config.serve.api_key, config.serve.admin_api_key) == ("hunter2", "hunter3")
    assert "hunter" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_kwargs(api_key=["hunter2"])
    assert "hunter2" not in str(caught.value)


def test_flags_with_and_without_a_value() -> None:
    assert parse(["--hybrid-kvcache-ratio"])[0].memory.hybrid_kvcache_ratio == 0.5
    assert parse(["--hybrid-kvcache-ratio", "1"])[0].memory.hybrid_kvcache_ratio == 1.0
    assert parse(["--debug-tensor-dump-inject"])[0].execute.debug_tensor_dump_inject is True
    assert parse(["--debug-tensor-dump-inject", "no"])[0].execute.debug_tensor_dump_inject is False
    assert parse(["--allow-local-media"])[0].media.allow_local_media == ("/",)
    assert parse(["--allow-local-media", "/a", "/b"])[0].media.allow_local_media == ("/a", "/b")


@pytest.mark.parametrize("word", ["None", "auto", "null"])
def test_spellings_of_unset_numbers(word: str) -> None:
    config, names = parse(["--page-size", word, "--max-total-tokens", word])
    assert config.memory.page_size is None
    assert config.memory.max_total_tokens is None
    assert names == {"page_size", "max_total_tokens"}


def test_choices_ignore_case() -> None:
    config, _ = parse(["--log-level", "INFO", "--speculative-algorithm", "eagle3"])
    assert config.observe.log_level == "info"
    assert config.speculate.speculative_algorithm == "EAGLE3"


@pytest.mark.parametrize(
    ("word", "name"),
    [("deepseek_r1", "deepseek-r1"), ("DeepSeek-R1", "deepseek-r1"), ("openai_gptoss", "gpt-oss")],
)
def test_choices_ignore_how_words_are_joined(word: str, name: str) -> None:
    config, _ = parse(["--reasoning-parser", word])
    assert config.serve.reasoning_parser == name


def test_renamed_parsers_exist() -> None:
    for option in ("tool_call_parser", "reasoning_parser"):
        flag = options()[option].flag
        assert {new for _, new in flag.old_values} <= set(flag.allowed)
        assert not {old for old, _ in flag.old_values} & set(flag.allowed)


def test_keywords_take_aliases_and_suggest() -> None:
    assert ServerConfig.from_kwargs(model="m", tp=2).model.model_path == "m"
    assert ServerConfig.from_kwargs(lora_paths={"a": "/b"}).adapters.lora_paths == ("a=/b",)
    assert ServerConfig.from_kwargs(tool_call_parser=None) == ServerConfig()
    with pytest.raises(ConfigError, match=r"argument pagesize is unknown; did you mean 'page_size"):
        ServerConfig.from_kwargs(pagesize=1)
    with pytest.raises(ConfigError, match=r"--page-size: 1.5 is not an integer"):
        ServerConfig.from_kwargs(page_size=1.5)


def test_help_shows_every_option_in_its_group() -> None:
    parser = build_parser("radixlm serve")
    short = parser.format_help()
    assert len(short.splitlines()) < 60 and "--help-all" in short and "--page-size" not in short
    parser.shows_all = True
    text = parser.format_help()
    for name, option in options().items():
        assert f"{option.dashed}" in text, name
    for owner in GROUPS.values():
        assert f"\n{(owner.__doc__ or '').rstrip('.')}:\n" in text
    assert "--schedule-heuristic" not in text


@pytest.mark.parametrize(
    ("flag", "shown"), [("-h", False), ("--help", False), ("--help-all", True)]
)
def test_help_exits_with_zero(capsys: pytest.CaptureFixture[str], flag: str, shown: bool) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([flag])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--mem-fraction-static" in out
    assert ("--page-size" in out) == shown


def test_a_word_without_a_flag_is_the_model() -> None:
    for words in (["some/model", "--port", "1"], ["--port", "1", "some/model"]):
        config, given = parse(words, takes_model=True)
        assert config.model.model_path == "some/model" and given == {"model_path", "port"}
    with pytest.raises(ConfigError, match="unexpected argument 'b'"):
        parse(["a", "b"], takes_model=True)
    with pytest.raises(ConfigError, match="unexpected argument 'a'"):
        parse(["--model-path", "b", "a"], takes_model=True)
    with pytest.raises(ConfigError, match="unexpected argument 'a'"):
        parse(["a"])


def test_underscores_in_flags_are_dashes() -> None:
    config, _ = parse(["--model_path=x_y", "--mem_fraction_static", "0.5"])
    assert (config.model.model_path, config.memory.mem_fraction_static) == ("x_y", 0.5)


def test_the_beginning_of_one_flag_stands_for_it(caplog: pytest.LogCaptureFixture) -> None:
    config, given = parse(["--max-total-token", "1536", "--context_len=64"])
    assert (config.memory.max_total_tokens, config.model.context_length) == (1536, 64)
    assert given == {"max_total_tokens", "context_length"}
    assert "--max-total-token is read as --max-total-tokens" in caplog.text
    for own, flag in (("", "--max-"), ("--max-total-x", "--max-total-")):
        with pytest.raises(ConfigError, match=f"{flag} is unknown"):
            parse([flag, "5"], own=(own,))


def test_suggestions_know_the_verbs_own_flags() -> None:
    with pytest.raises(ConfigError, match="did you mean '--num-prompts'"):
        parse(["--num-promts", "3"], own=("--num-prompts",))


def test_starting_costs_no_heavy_import() -> None:
    heavy = {"torch", "numpy", "yaml", "transformers", "msgspec", "pydantic"}
    code = f"""
import sys
import radixlm.config.server_config
assert "argparse" not in sys.modules
import radixlm.config.parser, radixlm.config.resolve
radixlm.config.parser.build_parser()
print(*({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
