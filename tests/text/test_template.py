"""Untrusted chat templates: harmless ones render as in Jinja, malicious ones end with an error
soon."""

from __future__ import annotations

import time

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.text import template as module
from radixlm.text.template import Template


def test_the_environment_equals_hugging_faces() -> None:
    source = (
        "{% for i in range(3) %}\n  {% if i == 1 %}{% continue %}{% endif %}\n{{ i }}\n{% endfor %}"
        "{{ {'a': '<é>', 'b': [1]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1) }}"
        "{% generation %}gen{% endgeneration %}{{ 'a' ~ 1 ~ none ~ nothing }}"
        "{{ 'x' * 3 + 'y' }}{{ '%s-%d' % ('a', 2) }}{{ 2 ** 3 }}{{ strftime_now('%Y') | length }}"
        "{% set ns = namespace(a=1) %}{% set ns.a = 5 %}{{ ns.a }}{{ [1, 2] + [3] }}"
        "{{ dict(a=1) }}{% set m = namespace(self=2, b='c') %}{{ m.self }}{{ m.b }}"
        "{{ 'a-b'.split('-')[::-1] | join('+') }}{{ 'abc'.replace('b', 'xx') }}"
    )
    text = Template(source).render({})
    assert text == (
        '0\n2\n{"a": "<é>", "b": [1]}{\n "b": 1,\n "a": 2\n}'
        "gena1Nonexxxya-2845[1, 2, 3]{'a': 1}2cb+aaxxc"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(999) %}{{ 'abcde' }}{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{% for j in range(999) %}"
        + "a" * 2000
        + "{% endfor %}{% endfor %}{% endset %}",
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(50) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 ** 99 }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s.replace('a', 'aaaaaaaa') %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s | replace('a', 'aaaaaaaa') %}{% endfor %}",
        "{% set ns = namespace(n=7) %}{% for i in range(60) %}"
        "{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set template_turn = 1 %}{% macro _turn(x) %}{% endmacro %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_malicious_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ITERATIONS", 200_000)
    start = time.thread_time()
    with pytest.raises(InvalidRequest, match="the chat template"):
        Template(source).render({})
    assert time.thread_time() - start < 10


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% endfor %}" * 20,
        "{% for m in messages %}{{ m }}{% endfor %}" * 20,
    ],
)
def test_cpu_time_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, many = Template(source), {"messages": [1] * 20_000}
    assert template.render({"messages": [1] * 10}) in ("", "1" * 200)
    monkeypatch.setattr(module, "MAX_SECONDS", 0.01)
    with pytest.raises(InvalidRequest, match="too slow"):
        template.render(many)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
        "{{ nothing.more }}",
        "{{ 'a' + 1 }}",
        "{{ undefined_function() }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.mro() }}",
    ],
)
def test_sandbox_violations_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Template("{{ none }}" + source).render({"messages": [{}]})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% for x in y %}", "{{ 'a' | nofilter }}"])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(InvalidRequest, match="does not compile") as caught:
        Template(source)
    assert caught.value.param == "chat_template"


def test_deep_templates_do_not_crash() -> None:
    for source in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 300):
        with pytest.raises(InvalidRequest):
            Template(source + "{% endif %}" * 300)
