"""Tool-call formats by name: parser, example, markers."""

from typing import NamedTuple

_PACKAGE = "radixlm.text.tools.formats"


class Structure(NamedTuple):
    """The text around a call's JSON arguments, with ``{name}`` for the function's name."""

    begin: str
    end: str
    trigger: str


class Format(NamedTuple):
    """``target`` is "module:class", ``example`` one call. ``is_special``: the markers are special
    tokens, which the detokenizer must keep. ``hints``: a chat template that contains all strings of
    one of these tuples uses this format."""

    target: str
    example: str
    is_special: bool = True
    hints: tuple[tuple[str, ...], ...] = ()
    structure: Structure | None = None

    @property
    def path(self) -> str:
        return f"{_PACKAGE}.{self.target}"


_HERMES = Format(
    "hermes:Hermes",
    '<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>',
    is_special=False,
    structure=Structure(
        '<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", "<tool_call>"
    ),
)
_QWEN3_CODER = Format(
    "qwen3_coder:Qwen3Coder",
    "<tool_call><function=f><parameter=k>v</parameter></function></tool_call>",
    is_special=False,
)
_GLM = Format(
    "glm45:Glm45",
    "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
    is_special=False,
)
_DSML = Format(
    "invoke:DeepSeekV32",
    '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v'
    "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
)

FORMATS: dict[str, Format] = {
    "gpt-oss": Format(
        "gpt_oss:GptOss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>",
        hints=(("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions")),
        structure=Structure(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
            "<|channel|>commentary to=",
        ),
    ),
    "kimi_k3": Format(
        "kimi_k3:KimiK3",
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v'
        "<|close|>argument<|sep|><|close|>call<|sep|>",
        hints=(("<|open|>", "<|sep|>"),),
    ),
    "kimi_k2": Format(
        "kimi_k2:KimiK2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>",
        hints=(("<|tool_calls_section_begin|>",), ("<|tool_call_argument_begin|>",)),
        structure=Structure(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|>",
        ),
    ),
    "deepseekv41": Format(
        "invoke:DeepSeekV41",
        '<｜DSML｜ calls><｜DSML｜ invoke name="f">…</｜DSML｜ invoke></｜DSML｜ calls>',
        hints=(("｜DSML｜ calls",), ("｜DSML｜ invoke",)),
    ),
    "deepseekv32": Format(_DSML.target, _DSML.example, hints=(("｜DSML｜function_calls",),)),
    "deepseekv4": Format(
        _DSML.target,
        _DSML.example.replace("function_calls", "tool_calls"),
        hints=(("｜DSML｜",),),
    ),
    "gigachat35": Format(
        "invoke:GigaChat35",
        '<｜GCML｜tool_calls><｜GCML｜invoke name="f"><｜GCML｜parameter name="k" string="true">v'
        "</｜GCML｜parameter></｜GCML｜invoke></｜GCML｜tool_calls>",
        hints=(("｜GCML｜",),),
    ),
    "step3": Format(
        "invoke:Step3",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="k">v</steptml:parameter></steptml:invoke><｜tool_call_end｜>',
        hints=(("<steptml:",), ("<｜tool_calls_begin｜>",)),
    ),
    "deepseekv3": Format(
        "deepseek_v3:DeepSeekV3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{…}\\n```<｜tool▁call▁end｜>",
        hints=(("<｜tool▁calls▁begin｜>", "```json"),),
        structure=Structure(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>",
        ),
    ),
    "deepseekv31": Format(
        "deepseek_v3:DeepSeekV31",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>",
        hints=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",)),
        structure=Structure(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>",
        ),
    ),
    "minimax-m3": Format(
        "minimax_m3:MiniMaxM3",
        "]<]minimax[>[ in front of each of <tool_call>, <invoke name=…>, <k>v, </k>",
        hints=(("]<]minimax[>[",),),
    ),
    "minimax-m2": Format(
        "invoke:MiniMaxM2",
        '<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>'
        "</minimax:tool_call>",
        hints=(("<minimax:tool_call>",),),
    ),
    "dots": Format(
        "invoke:Dots",
        '<dots_function_call><invoke name="f"><parameter name="k">v</parameter></invoke>'
        "</dots_function_call>",
        hints=(("<dots_function_call>",),),
    ),
    "muse": Format(
        "invoke:Muse",
        '<atem:function_calls><atem:invoke name="f"><atem:parameter name="k">v'
        "</atem:parameter></atem:invoke></atem:function_calls>",
        hints=(("<atem:",),),
    ),
    "interns1": Format(
        "tagged_json:InternS1",
        '<|action_start|> <|plugin|>\\n{"name": "f", "parameters": {…}}<|action_end|>',
        hints=(("<|action_start|>",),),
        structure=Structure(
            '<|action_start|> <|plugin|>\n{{"name": "{name}", "parameters": ',
            "}<|action_end|>",
            "<|action_start|>",
        ),
    ),
    "k2_horizon": Format(
        "glm45:K2Horizon",
        "<ifm|tool_call>f<ifm|arg_key>k</ifm|arg_key><ifm|arg_value>v</ifm|arg_value>"
        "</ifm|tool_call>",
        hints=(("<ifm|tool_call",),),
    ),
    "iquest_q1": Format(
        "glm45:IQuestQ1",
        "<iquest_tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></iquest_tool_call>",
        hints=(("<iquest_tool_call>",),),
    ),
    "hunyuan": Format(
        "glm45:Hunyuan",
        "<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>"
        "</tool_call></tool_calls>",
        hints=(("<tool_sep>",),),
    ),
    "lfm2": Format(
        "pythonic:Lfm2",
        '<|tool_call_start|>[f(k="v")]<|tool_call_end|>',
        hints=(("<|tool_call_start|>",),),
    ),
    "cohere_command4": Format(
        "tagged_json:Cohere",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {…}}]<|END_ACTION|>',
        hints=(("<|START_ACTION|>",),),
        structure=Structure(
            '<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
            "}]<|END_ACTION|>",
            "<|START_ACTION|>",
        ),
    ),
    "apertus2509": Format(
        "tagged_json:Apertus",
        '<|tools_prefix|>[{"f": {…}}]<|tools_suffix|>',
        hints=(("<|tools_prefix|>",),),
        structure=Structure(
            '<|tools_prefix|>[{{"{name}": ', "}]<|tools_suffix|>", "<|tools_prefix|>"
        ),
    ),
    "inkling": Format(
        "tagged_json:Inkling",
        '<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {…}}<|end_message|>',
        hints=(("<|content_invoke_tool_json|>",),),
    ),
    "gemma4": Format(
        "gemma4:Gemma4",
        '<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>',
        hints=(("<|tool_call>", "<tool_call|>"),),
    ),
    "gigachat3": Format(
        "tagged_json:GigaChat3",
        '<|message_sep|>\\n\\nfunction call<|role_sep|>\\n{"name": "f", "arguments": {…}}',
        hints=(("<|role_sep|>",), ("<|function_call|>",)),
    ),
    "minicpm5": Format(
        "invoke:MiniCpm5",
        '<function name="f"><param name="k">v</param></function>',
        is_special=False,
        hints=(("<function name=", "<param name="),),
    ),
    "olmo3": Format(
        "pythonic:Olmo3",
        '<function_calls>\\nf(k="v")\\n</function_calls>',
        is_special=False,
        hints=(("<function_calls>", "<functions>"),),
    ),
    "seed_oss": Format(
        "qwen3_coder:SeedOss",
        "<seed:tool_call><function=f><parameter=k>v</parameter></function></seed:tool_call>",
        hints=(("<seed:tool_call>",),),
    ),
    "phi4": Format(
        "tagged_json:Phi4",
        'functools[{"name": "f", "arguments": {…}}]',
        hints=(("<|/tool_call|>",), ("<|tool|>", "<|/tool|>"), ("functools[",)),
    ),
    "granite": Format(
        "tagged_json:Granite",
        '<|tool_call|>[{"name": "f", "arguments": {…}}]',
        hints=(("<|tool_call|>",), ("<|start_of_role|>", "available_tools")),
    ),
    "mistral": Format(
        "mistral:Mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {…}}] or [TOOL_CALLS]f[ARGS]{…}',
        hints=(("[TOOL_CALLS]",),),
        structure=Structure(
            '[TOOL_CALLS] [{{"name": "{name}", "arguments": ', "}]", "[TOOL_CALLS]"
        ),
    ),
    "qwen3_coder": Format(
        _QWEN3_CODER.target,
        _QWEN3_CODER.example,
        is_special=False,
        hints=(("<function=", "<parameter="),),
    ),
    "glm45": Format(_GLM.target, _GLM.example, is_special=False, hints=(("<arg_key>",),)),
    "qwen25": Format(
        _HERMES.target,
        _HERMES.example,
        is_special=False,
        hints=(("<tool_call>", "<|im_start|>"),),
        structure=_HERMES.structure,
    ),
    "hermes": Format(
        _HERMES.target,
        _HERMES.example,
        is_special=False,
        hints=(("<tool_call>",),),
        structure=_HERMES.structure,
    ),
    "pythonic": Format(
        "pythonic:Pythonic",
        '[f(k="v"), g()]',
        is_special=False,
        hints=(("<|python_start|>",), ("func_name1(params_name1",), ("[func_name(",)),
    ),
    "llama3": Format(
        "llama3:Llama3",
        '<|python_tag|>{"name": "f", "parameters": {…}}; … (the tag may be missing)',
        hints=(
            ("<|python_tag|>",),
            ('{"name": function name, "parameters":',),
            ("<|start_header_id|>", "ipython"),
        ),
        structure=Structure(
            '<|python_tag|>{{"name": "{name}", "parameters": ', "}", "<|python_tag|>"
        ),
    ),
    "qwen": _HERMES,
    "trinity": Format("hermes:Trinity", _HERMES.example, False, structure=_HERMES.structure),
    "glm": _GLM,
    "glm47": _GLM,
    "ling3": _GLM,
    "spark25": _GLM,
    "poolside_v1": Format("glm45:PoolsideV1", _GLM.example, False),
    "step3p5": _QWEN3_CODER,
    "nanbeige": _QWEN3_CODER,
    "mimo": _QWEN3_CODER,
    "json": Format(
        "llama3:BareJson", '[{"name": "f", "parameters": {…}}]: forced calls', is_special=False
    ),
}

# values of --tool-call-parser
CHOICES = ("auto", "none", "response_template", *FORMATS)
