"""Templates that would take gigabytes or half a minute end at once, by their budget."""

from __future__ import annotations

import time

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.text.template import Template

BOMBS = """
{{ ("a"*100000).translate({97: "x"*100000})|length }}
{{ ("ab "*1000000)|wordwrap(1)|length }}
{{ ("a b "*20000)|wordwrap(1, wrapstring="x"*9000)|length }}
{{ ("\\n"*1000000)|indent(9000)|length }}
{{ (["x"*100000]*1000000)|join|length }}
{{ (["x"*100000]*1000000)|map("upper")|join|length }}
{{ "".join(["x"*100000]*1000000)|length }}
{{ [["x"*100000]*1000]*1000 }}
{{ ([["x"*100000]*1000]*1000) ~ "a" }}
{{ ([["x"*100000]*1000]*1000)|string|length }}
{{ ("{0}"*100000).format("x"*100000)|length }}
{{ ("%(a)s"*100000) % {"a": "x"*100000} }}
{{ ("%s"*10000)|format("x"*100000)|length }}
{{ (["x"*100000]*100000)|tojson|length }}
{{ ([1]*1000)|tojson(indent=9000)|length }}
{{ ([[1]*100000]*10000)|sum(start=[])|length }}
{{ ("http://a.b "*1000000)|urlize|length }}
{{ ("a b"*3000000)|title|length }}
{{ ("ab"*5000000)|groupby(0)|length }}
{{ ("ab"*5000000)|sort|length }}
{{ ("ab"*9000000)|map("upper")|list|length }}
{{ ("a"*60000000)|list|length }}
{{ ("ab,"*20000000).split(",")|length }}
{{ ("a "*30000000).rsplit()|length }}
{{ ("a\\n"*30000000).splitlines()|length }}
{{ ([0]*100000000)|length }}
{{ cycler(*("a"*60000000)) }}
{{ "a"|format(*("a"*60000000)) }}
{{ "".join("a"*60000000)|length }}
""".strip().splitlines()


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_is_stopped(source: str) -> None:
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="the chat template was stopped"):
        Template(source).render({})
    assert time.thread_time() - began_s < 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{{ "aba".translate({97: "xy"}) }}', "xybxy"),
        ('{{ ("ab "*4)|wordwrap(5) }}', "ab ab\nab ab"),
        ('{{ "a\nb"|indent(2) }}', "a\n  b"),
        ('{{ ["a", 1]|join("-") }}', "a-1"),
        ('{{ ["a", "b"]|map("upper")|join }}', "AB"),
        ('{{ [{"a": [1, "x"]}] }}', "[{'a': [1, 'x']}]"),
        ('{{ {"a": [1]}|tojson(indent=2) }}', '{\n  "a": [\n    1\n  ]\n}'),
        ('{{ [1, 2]|sum }} {{ "%s %s"|format("a", 2) }} {{ "{} {}".format("b", 3) }}', "3 a 2 b 3"),
        ('{{ ["b", "a", "b"]|unique|sort|list }}', "['a', 'b']"),
    ],
)
def test_the_same_filters_work_on_texts_of_a_chat(source: str, text: str) -> None:
    assert Template(source).render({}).rstrip() == text
