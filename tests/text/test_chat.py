"""Chat prompts equal transformers' apply_chat_template; built-in templates; errors name their
field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import toy_tokenizer

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.text.chat import ChatTemplate, load_chat_template
from radixlm.text.conversations import CONVERSATIONS, guess_name
from radixlm.text.token_bytes import Decoder
from radixlm.text.tokenizer import Tokenizer

CHATML_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("no such role: " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INSTRUCTION = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""
PARTS = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{% for content in message['content'] %}{% if content['type'] == 'image' %}<image>
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's <weather> in a city, ü",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi  <b>there</b> ü "}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello "},
        {"role": "user", "content": "More"},
    ],
    [
        {"role": "system", "content": " Be nice. "},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "\nhm\n",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
            ],
        },
        {"role": "tool", "content": "22", "tool_call_id": "x"},
    ],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizer.words(), chat_template=source, **SPECIAL
    )


def outcome(call: Any) -> tuple[str, str]:
    import jinja2

    try:
        return "text", call()
    except (InvalidRequest, jinja2.TemplateError) as error:
        return "refused", type(error).__name__[:0]


@pytest.mark.parametrize("source", [CHATML_TOOLS, HEADERS, INSTRUCTION, PARTS])
@pytest.mark.parametrize("chat", CHATS)
def test_prompts_equal_transformers(source: str, chat: list[dict[str, Any]]) -> None:
    ours, reference = ChatTemplate(source, SPECIAL), theirs(source)
    for extra in ({}, {"enable_thinking": False}, {"date_string": "1 Jan"}):
        for tools in (None, TOOLS):
            for generate in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate}
                expected = outcome(
                    lambda options=options, extra=extra: reference.apply_chat_template(
                        chat, tokenize=False, **options, **extra
                    )
                )
                found = outcome(
                    lambda options=options, extra=extra: ours.render(
                        chat, **options, template_kwargs=extra
                    )
                )
                assert found == expected


@pytest.mark.parametrize("source", [CHATML_TOOLS, HEADERS, PARTS])
@pytest.mark.parametrize("content", ["It is", "a space ", [("text", "a "), ("text", "b")]])
def test_the_final_message_is_continued_as_in_transformers(source: str, content: Any) -> None:
    if isinstance(content, list):
        if source is not PARTS:
            return
        content = [{"type": kind, "text": text} for kind, text in content]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    expected = theirs(source).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    template = ChatTemplate(source, SPECIAL)
    assert template.render(chat, continue_final_message=True) == expected
    assert chat[1]["content"] == content


def test_arguments_sent_as_json_text_become_objects() -> None:
    template = ChatTemplate(CHATML_TOOLS)
    as_text = json.loads(json.dumps(CHATS[2]))
    as_text[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    as_text[2]["tool_calls"][0]["id"] = None
    as_text[2]["content"] = None
    assert template.render(as_text) == template.render(CHATS[2])
    as_text[2]["tool_calls"][0]["function"]["arguments"] = "{broken"
    assert '"arguments": {broken}' in template.render(as_text)


def test_the_content_format_is_read_from_the_template() -> None:
    formats = [ChatTemplate(s).content_format for s in (CHATML_TOOLS, HEADERS, INSTRUCTION, PARTS)]
    assert formats == ["string", "string", "string", "openai"]
    through_macro = "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
    assert ChatTemplate(through_macro).content_format == "openai"
    renamed = "{% set body = messages[0].content %}{% for c in body %}{% endfor %}"
    assert ChatTemplate(renamed).content_format == "openai"


def test_parts_become_text_or_stay_parts() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
        {"type": "input_text", "text": "b"},
    ]
    chat = [{"role": "user", "content": parts}]
    assert ChatTemplate("{{ messages[0].content }}").render(chat) == "a b"
    assert ChatTemplate(PARTS).render(chat).startswith("<|im_start|>user\na<image>\nb")
    vicuna = ChatTemplate("{{ messages[0].content }}", media={"image": "<i{index}>"})
    assert vicuna.render(chat + chat) == "a<i1>b"


def test_developer_becomes_system_if_the_template_lacks_it() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}").render(chat) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render(chat) == "developer"


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": 5}]}],
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_bad_messages_name_the_field(chat: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML_TOOLS).render(chat)
    assert caught.value.param == param


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(INSTRUCTION, SPECIAL).render([{"role": "assistant", "content": "x"}])
    with pytest.raises(InvalidRequest, match="drops the text"):
        ChatTemplate("nothing").render(CHATS[0], continue_final_message=True)


def tokenizer(templates: dict[str, str]) -> Tokenizer:
    return Tokenizer(toy_tokenizer.words(), Decoder.from_json(None), SPECIAL, templates)


def test_the_option_overrides_the_checkpoint(tmp_path: Path) -> None:
    own = tokenizer({"default": "own {{ bos_token }}", "tool_use": "tools", "rag": "rag"})
    chat = CHATS[0]
    assert load_chat_template(own).render(chat) == "own <s>"
    assert load_chat_template(own).render(chat, tools=TOOLS) == "tools"
    assert load_chat_template(own, "rag").render(chat) == "rag"
    assert load_chat_template(own).render(chat, chat_template="mine") == "mine"
    (tmp_path / "a.jinja").write_text("file\n")
    assert load_chat_template(own, str(tmp_path / "a.jinja")).render(chat) == "file"
    (tmp_path / "b.jinja").write_text("{% if %}")
    for bad in ("nowhere", str(tmp_path / "b.jinja")):
        with pytest.raises(ConfigError, match="chat-template"):
            load_chat_template(own, bad)
    assert "<|im_start|>user" in load_chat_template(tokenizer({})).render(chat)
    vicuna = load_chat_template(tokenizer({}), model_path="/models/vicuna-7b")
    assert vicuna.render(chat).endswith("ASSISTANT:")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("chatmll", None, r"no file and none of: .*; did you mean 'chatml'\?$"),
        ("bad.json", '{"system": ""}', r"bad.json: 'user' is missing; a conversation format in"),
        ("cut.json", '{"system": ', r"cut.json: Expecting value.*; a conversation format in JSON"),
        ("bad.jinja", "\n{% for %}", r"bad.jinja: the template does not compile: line 2: "),
    ],
)
def test_a_wrong_argument_is_told(
    name: str, text: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_chat_template(tokenizer({}), name)


def test_a_json_file_describes_a_format(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    given = {"name": "x", "system": "SYS:", "system_message": "be", "user": "U", "assistant": "A"}
    cases = {
        "ADD_COLON_SINGLE": "SYS:\nbe|U: q|A: a|U: q|A:",
        "ADD_COLON_TWO": "SYS:\nbe|U: q|A: a$U: q|A:",
        "ADD_COLON_SPACE_SINGLE": "SYS:\nbe|U: q|A: a|U: q|A: ",
        "ADD_NEW_LINE_SINGLE": "SYS:\nbe|U\nq|A\na|U\nq|A\n",
        "NO_COLON_SINGLE": "SYS:\nbeUq|Aa|Uq|A",
        "NO_COLON_TWO": "SYS:\nbeUq|Aa$Uq|A",
        "CHATML": "SYS:\nbe|\nU\nq|\nA\na|\nU\nq|\nA\n",
    }
    question = {"role": "user", "content": "q"}
    chat = [question, {"role": "assistant", "content": "a"}, question]
    for style, expected in cases.items():
        values = {**given, "sep_style": style, "sep": "|", "sep2": "$", "stop_str": ["U", "A"]}
        file.write_text(json.dumps(values))
        template = load_chat_template(tokenizer({}), str(file))
        assert template.render(chat) == expected
        assert template.stops == ("U", "A")
    for bad in ("{}", "[]", "{", json.dumps({**given, "sep_style": "ODD"})):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="chat-template"):
            load_chat_template(tokenizer({}), str(file))


EXPECTED = {
    "llama-2": "[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST] a </s><s>[INST] q [/INST]",
    "mistral": "[INST] [SYSTEM_PROMPT]\nS\n[/SYSTEM_PROMPT]\n\nq [/INST] a </s><s>[INST] q [/INST]",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
    "vicuna_v1.1": "S USER: q ASSISTANT: a</s>USER: q ASSISTANT:",
    "gemma-it": "<start_of_turn>user\nS\n\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
    "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
    "llama-4": "<|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>"
    "\n\nq<|eot|><|header_start|>assistant<|header_end|>\n\na<|eot|>"
    "<|header_start|>user<|header_end|>\n\nq<|eot|><|header_start|>assistant<|header_end|>\n\n",
    "deepseek-vl2": "S\n\n<|User|>: q\n\n<|Assistant|>: a<｜end▁of▁sentence｜><|User|>: q\n\n"
    "<|Assistant|>:",
    "phi-4-mm": "<|system|>S<|end|><|user|>q<|end|><|assistant|>a<|end|><|user|>q<|end|>"
    "<|assistant|>",
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_built_in_formats(name: str) -> None:
    template = load_chat_template(tokenizer({}), name)
    question = {"role": "user", "content": "q"}
    chat = [{"role": "system", "content": "S"}, question, {"role": "assistant", "content": "a"}]
    text = template.render([*chat, question])
    if name in EXPECTED:
        assert text == EXPECTED[name]
    assert text.count("q") >= 2
    without = template.render([question])
    assert "q" in without
    assert CONVERSATIONS[name].default_system in without
    continued = template.render([question, chat[2]], continue_final_message=True)
    assert continued.endswith("a")
    with pytest.raises(InvalidRequest, match="unknown"):
        template.render([{"role": "oracle", "content": "x"}])


def test_names_of_the_wire_contract_are_all_there() -> None:
    names = (
        "llama-2 mistral devstral llama-4 phi-4-mm chatml chatml-llava vicuna_v1.1 llama_3_vision "
        "llava_llama_3 internlm2-chat internvl-2-5 qwen2-vl deepseek-vl2 gemma-it gme-qwen2-vl "
        "minicpmv janus-pro minicpmo kimi-vl qwen2-audio"
    )
    assert set(names.split()) <= set(CONVERSATIONS)
    assert [guess_name(p) for p in ("Llama-2-7b-chat", "Qwen2-VL", "x")] == [
        "llama-2",
        "qwen2-vl",
        "chatml",
    ]


OLDER: list[dict[str, Any]] = [
    {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
    {"role": "function", "name": "f", "content": "3"},
]
EACH = "{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.arguments.a }}{% endfor %}"


@pytest.mark.parametrize(
    ("test", "role"),
    [
        ("", "tool"),
        ('{{ \'{"type": "function"}\' }}', "tool"),
        ("{% if m.role == 'function' %}{% endif %}", "function"),
        ("{% if m['role'] in ('tool', 'function') %}{% endif %}", "function"),
    ],
)
def test_results_of_functions_are_those_of_tools_unless_the_template_has_the_role(
    test: str, role: str
) -> None:
    text = ChatTemplate(EACH + CALLS + test + "{{ m.content }}{% endfor %}").render(OLDER)
    assert f"<{role}>" in text and text.startswith("<assistant>call00001 1")
