"""Every option, dataset and backend of SGLang 0.5.2's benchmarks: served, or refused by name with
the reason."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench import offline, one_batch, one_batch_server, serve
from radixlm.bench.backends import BACKENDS
from radixlm.bench.datasets import DATASETS
from radixlm.bench.options import dataset_options
from radixlm.bench.reference import REFUSED_FLAGS, headers_of, profile_body
from radixlm.config.verb_parser import VerbParser

# option -> a value that is accepted ("" for a switch), None: refused
DATA = {
    "--dataset-path": "f",
    "--num-prompts": "3",
    "--sharegpt-output-len": "3",
    "--sharegpt-context-len": "3",
    "--random-input-len": "3",
    "--random-output-len": "3",
    "--random-range-ratio": "0.5",
    "--gsp-num-groups": "3",
    "--gsp-prompts-per-group": "3",
    "--gsp-system-prompt-len": "3",
    "--gsp-question-len": "3",
    "--gsp-output-len": "3",
    "--seed": "3",
    "--disable-ignore-eos": "",
    "--extra-request-body": "{}",
    "--apply-chat-template": "",
    "--prompt-suffix": "x",
}
SERVING = DATA | {
    "--base-url": "http://x",
    "--host": "x",
    "--port": "3",
    "--model": "x",
    "--tokenizer": "x",
    "--random-image-num-images": "3",
    "--random-image-resolution": "720p",
    "--request-rate": "3.5",
    "--use-trace-timestamps": "",
    "--max-concurrency": "3",
    "--output-file": "f",
    "--output-details": "",
    "--disable-tqdm": "",
    "--disable-stream": "",
    "--return-logprob": "",
    "--profile": "",
    "--lora-name": "a",
    "--pd-separated": "",
    "--flush-cache": "",
    "--warmup-requests": "3",
    "--tokenize-prompt": "",
    "--mooncake-slowdown-factor": "2.0",
    "--mooncake-num-rounds": "3",
    "--mooncake-workload": "toolagent",
    **{f"--dataset-name {name}": "" for name in (
        "sharegpt random random-ids generated-shared-prefix mmmu random-image mooncake".split()
    )},
    **{f"--backend {name}": "" for name in (
        "sglang sglang-native sglang-oai sglang-oai-chat vllm vllm-chat lmdeploy lmdeploy-chat"
    ).split()},
    **{f"--backend {name}": None for name in ("trt", "gserver", "truss")},
}  # fmt: skip
SHAPES = {"--run-name": "x", "--batch-size": "1", "--input-len": "3", "--output-len": "3"}
ONE_BATCH = SHAPES | {
    "--result-filename": "f",
    "--prompt-filename": None,
    "--correctness-test": None,
    "--correct": None,
    "--cut-len": None,
    "--log-decode-step": None,
    "--profile": None,
    "--profile-record-shapes": None,
    "--profile-filename-prefix": None,
}
SERVER = SHAPES | {
    "--temperature": "0.5",
    "--return-logprob": "",
    "--client-stream-interval": "2",
    "--input-len-step-percentage": "0.1",
    "--result-filename": "f",
    "--base-url": "http://x",
    "--skip-warmup": "",
    "--show-report": "",
    "--profile": None,
    "--profile-steps": None,
    "--profile-by-stage": None,
    "--dataset-path": None,
}
OFFLINE = DATA | {
    "--backend engine": "",
    "--result-filename": "f",
    "--dataset-name sharegpt": "",
    "--skip-warmup": "",
    "--profile": None,
    "--do-not-exit": None,
}
TABLE = [
    (build, name, option, value)
    for build, name, options in (
        (serve.build_parser, "bench_serving", SERVING),
        (one_batch.build_parser, "bench_one_batch", ONE_BATCH),
        (one_batch_server.build_parser, "bench_one_batch_server", SERVER),
        (offline.build_parser, "bench_offline_throughput", OFFLINE),
    )
    for option, value in options.items()
]


@pytest.mark.parametrize(
    ("build", "option", "value"),
    [pytest.param(b, o, v, id=f"{name} {o}") for b, name, o, v in TABLE],
)
def test_option(build: Callable[[], VerbParser], option: str, value: str | None) -> None:
    words = [*option.split(), *([value] if value else [])]
    if value is not None:
        args = build().parse_args(words)
        dest = {"result_filename": "output_file"}.get(
            words[0][2:].replace("-", "_"), words[0][2:].replace("-", "_")
        )
        found = vars(args).get(dest, vars(args).get("result_filename"))
        assert found not in (None, False)
        return
    with pytest.raises(ConfigError, match=r"is not served: .{10}"):
        build().parse_args([*words, "1"] if len(words) == 1 else words)


NEWER = {
    "--temperature": "0.5",
    "--top-p": "0.5",
    "--header": "A=b",
    "--ready-check-timeout-sec": "3",
    "--cache-report": "",
    "--image-format": "png",
    "--image-content": "blank",
    "--gsp-range-ratio": "0.5",
    "--gsp-ordered": "",
    "--gsp-group-distribution": "zipf",
    "--gsp-zipf-alpha": "1.2",
    "--profile-activities": "CPU",
    "--profile-start-step": "3",
    "--profile-num-steps": "3",
    "--profile-by-stage": "",
    "--profile-stages": "decode",
    "--profile-output-dir": "f",
    "--profile-prefix": "x",
    "--backend sglang-embedding": None,
    "--backend vllm-embedding": None,
    **dict.fromkeys(REFUSED_FLAGS),
}


@pytest.mark.parametrize(("option", "value"), NEWER.items())
def test_options_of_newer_serving_benchmarks(option: str, value: str | None) -> None:
    test_option(serve.build_parser, option, value)


def test_names_that_newer_serving_benchmarks_changed() -> None:
    words = "--dataset-name image --image-count 2 --image-resolution 720p --profile-steps 3"
    args = serve.build_parser().parse_args(words.split())
    options = dataset_options(args)
    assert options.dataset_name == "random-image" and options.random_image_num_images == 2
    assert options.random_image_resolution == "720p"
    assert profile_body(args) == {"num_steps": 3}


@pytest.mark.parametrize("module", [one_batch, one_batch_server])
def test_short_names_of_a_batch(module: Any) -> None:
    args = module.build_parser().parse_args("--batch 2 --input 8 16 --output 4".split())
    assert (args.batch_size, args.input_len, args.output_len) == ([2], [8, 16], [4])


def test_headers() -> None:
    assert headers_of(["A=b", "C=d=e"]) == {"A": "b", "C": "d=e"}
    with pytest.raises(ConfigError, match="--header 'A': expected NAME=VALUE"):
        headers_of(["A"])


def test_new_names_are_listed_with_an_error() -> None:
    with pytest.raises(ConfigError, match="one of sglang, sglang-native"):
        serve.build_parser().parse_args(["--backend", "new"])
    assert len(BACKENDS) == 8 and len(DATASETS) == 8


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        ("bench_serving", "bench serve"),
        ("bench_one_batch", "bench one-batch"),
        ("bench_one_batch_server", "bench one-batch-server"),
        ("bench_offline_throughput", "bench offline"),
        ("check_env", "check-env"),
        ("profiler", "profile"),
        ("launch_server", "serve"),
        ("launch_router", "router"),
    ],
)
def test_modules_of_the_reference(module: str, verb: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as leave:
        runpy.run_module(f"radixlm.{module}", run_name="__main__")
    assert not leave.value.code
    assert f"radixlm {verb}" in capsys.readouterr().out
