"""Flags of the gateway beside those of sglang-router 0.3.2."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.pages.gateway_arguments import render

from radixlm.base.errors import ConfigError
from radixlm.router.flags import Flags
from radixlm.router.options import AdminKey, Options, parse, read, table


def test_defaults_are_the_references() -> None:
    options = parse([])
    assert (options.host, options.port, options.policy) == ("0.0.0.0", 30000, "cache_aware")
    assert (options.cache_threshold, options.balance_abs_threshold) == (0.3, 64)
    assert (options.retry_max_retries, options.retry_max_backoff_ms) == (5, 30000)
    assert (options.cb_failure_threshold, options.cb_window_duration_secs) == (10, 120)
    assert (options.health_failure_threshold, options.health_success_threshold) == (3, 2)
    assert (options.max_payload_size, options.max_concurrent_requests) == (512 << 20, -1)
    assert (options.prometheus_port, options.history_backend) == (29000, "memory")


def test_every_flag_has_help_and_a_default_that_is_accepted() -> None:
    assert {*table()} == {*Flags.__struct_fields__}
    for name, one in table().items():
        assert one.help.endswith(".") or one.default is not None, name
    assert parse([]) == Options()


def test_lists_pairs_and_repeated_flags() -> None:
    line = (
        "--pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 none "
        "--prefill http://r:1 --decode http://d:1 --decode http://e:1 --selector app=a env=b"
    )
    options = parse(line.split())
    assert options.prefill_urls == (
        ("http://p:1", 9000),
        ("http://q:1", None),
        ("http://r:1", None),
    )
    assert options.decode == ("http://d:1", "http://e:1")
    assert options.pairs("selector") == {"app": "a", "env": "b"}
    assert parse(["--selector", "app=a env=b"]).pairs("selector") == {"app": "a", "env": "b"}
    assert parse(["--worker-urls"]).worker_urls == ()
    assert parse(["--worker-urls", "http://a:1@0"]).worker_urls == ("http://a:1@0",)
    keys = parse(["--control-plane-api-keys", "1:Me:ADMIN:a:b"]).admin_keys
    assert keys == (AdminKey("1", "Me", "admin", "a:b"),)
    assert parse(["--jwt-role-mapping", "My Role=admin"]).roles == {"My Role": "admin"}
    assert parse(["--disable-retries"]).num_tries == 1
    twice = parse("--worker-urls http://a:1 --worker-urls http://b:1 http://c:1".split())
    assert twice.worker_urls == ("http://a:1", "http://b:1", "http://c:1")
    aliases = parse("--model-alias gpt-4=qwen --model-alias x=a=b".split()).aliases
    assert aliases == {"gpt-4": "qwen", "x": "a=b"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--polcy random", "--policy"),
        ("--policy none", "round_robin"),
        ("--port 65536", "30000"),
        ("--worker-urls nope", "http://127.0.0.1:30001"),
        ("--worker-urls grpc://a:1", "HTTP"),
        ("--worker-urls http://a:99999", "http://127.0.0.1:30001"),
        ("--worker-urls http://a:1/v1", "host and port"),
        ("--worker-urls http://user:pass@a:1", "host and port"),
        ("--worker-urls http://a:1?x=y", "host and port"),
        ("--prefill http://a:1", "--pd-disaggregation"),
        ("--pd-disaggregation --prefill http://a:1 x", "8998"),
        ("--decode-policy bucket", "round_robin"),
        ("--enable-wasm", "WebAssembly"),
        ("--enable-mesh", "not built"),
        ("--mesh-peer-urls http://a:1", "--mesh-peer-urls"),
        ("--epd-disaggregation", "not built"),
        ("--model-alias qwen=qwen", "gpt-4=radix-tiny"),
        ("--model-alias qwen", "gpt-4=radix-tiny"),
        ("--overload-token-usage-threshold 0", "(0, 1]"),
        ("--tls-cert-path x", "--tls-key-path"),
        ("--jwt-issuer x", "--jwt-audience"),
        ("--retry-max-backoff-ms 1", "--retry-initial-backoff-ms"),
        ("--queue-timeout-secs 0", "--queue-size 0"),
        ("--health-check-endpoint health", "/health"),
        ("--service-discovery", "--selector"),
        ("--history-backend redis", "--redis-url"),
        ("--history-backend oracle", "--oracle-username"),
        ("--history-backend postgres --oracle-pool-max 0", "16"),
        ("--oracle-pool-min 9 --oracle-pool-max 8", "16"),
        ("--service-discovery --selector a=b --backend openai", "--backend"),
        ("--service-discovery --pd-disaggregation --selector a=b", "--prefill-selector"),
        ("--history-backend oracle --oracle-user u --oracle-password p", "--oracle-tns-alias"),
        ("--prefill", "--prefill"),
        ("--control-plane-api-keys a:b", "id:name:role:key"),
        ("--control-plane-api-keys a:b:root:c", "admin"),
        ("extra", "extra"),
    ],
)
def test_an_error_names_the_flag_and_what_works(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(line.split())
    assert says in str(error.value)


def test_what_has_no_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert parse(["--mini-lb", "--pd-disaggregation"]).mini_lb
    assert "--mini-lb has no effect" in caplog.text


def test_an_unknown_option_of_a_program_is_named() -> None:
    with pytest.raises(ConfigError, match="'policy'"):
        read({"polcy": "random"})


def test_the_environment_sets_what_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://a")
    monkeypatch.setenv("ATP_POOL_MAX", "3")
    assert parse(["--history-backend", "redis"]).redis_url == "redis://a"
    assert parse(["--oracle-pool-max", "4"]).oracle_pool_max == 4


def test_secrets_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@a")
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "--redis-url" in (shown := capsys.readouterr().out) and "secret" not in shown
    with pytest.raises(ConfigError) as error:
        parse(["--control-plane-api-keys", "secret"])
    assert "secret" not in str(error.value)


def test_the_page_of_flags_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "gateway-arguments.md"
    assert page.read_text(encoding="utf-8") == render(), "run scripts/docs"


def test_the_name_of_authorities_in_the_references_guide() -> None:
    assert parse(["--ca-cert-path", "a.pem", "b.pem"]).ca_cert_paths == ("a.pem", "b.pem")
