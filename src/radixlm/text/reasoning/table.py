"""The reasoning markers of each family, and how its reasoning is turned on and off."""

from typing import NamedTuple

_TOOL_CALL = ("<tool_call>",)


class Markers(NamedTuple):
    """``starts`` and ``ends``: the first of each is the one templates use.

    ``breaks`` end the reasoning too but stay in the text (a tool call begins); the reasoning
    continues after ``resume``. ``stripped`` markers are removed from the text. ``is_inside``:
    messages begin with reasoning even without a start marker. ``template_variable`` of the chat
    template turns reasoning on and off; ``is_on_by_default`` is its default.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    breaks: tuple[str, ...] = ()
    resume: str = ""
    stripped: tuple[str, ...] = ()
    is_inside: bool = False
    is_special: bool = False
    template_variable: str | None = None
    is_on_by_default: bool = True
    hints: tuple[tuple[str, ...], ...] = ()
    target: str = "radixlm.text.reasoning.markup:MarkupReasoning"


_FORCED = Markers(is_inside=True)
_QWEN3 = Markers(breaks=_TOOL_CALL, template_variable="enable_thinking")
_OPT_IN = Markers(breaks=_TOOL_CALL, template_variable="enable_thinking", is_on_by_default=False)

MARKERS: dict[str, Markers] = {
    "gpt-oss": Markers(
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|channel|>final<|message|>",),
        is_inside=True,
        is_special=True,
        hints=(("<|channel|>", "<|message|>"),),
        target="radixlm.text.reasoning.harmony:HarmonyReasoning",
    ),
    "kimi": Markers(
        starts=("◁think▷",), ends=("◁/think▷",), is_special=True, hints=(("◁think▷",),)
    ),
    "kimi_k3": Markers(
        starts=("<|open|>think<|sep|>",),
        ends=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        breaks=("<|open|>tools<|sep|>",),
        stripped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        is_inside=True,
        is_special=True,
        template_variable="thinking",
        hints=(("<|open|>", "<|sep|>"),),
    ),
    "minimax-m3": Markers(starts=("<mm:think>",), ends=("</mm:think>",), hints=(("<mm:think>",),)),
    "gemma4": Markers(
        starts=("<|channel>thought\n", "<|channel>thought", "<|channel>"),
        ends=("<channel|>",),
        breaks=("<|tool_call>",),
        is_special=True,
        template_variable="enable_thinking",
        is_on_by_default=False,
        hints=(("<|channel>", "<channel|>"),),
    ),
    "apertus2509": Markers(
        starts=("<|inner_prefix|>",),
        ends=("<|inner_suffix|>",),
        breaks=("<|tools_prefix|>",),
        resume="<|tools_suffix|>",
        is_special=True,
        template_variable="enable_thinking",
        is_on_by_default=False,
        hints=(("<|inner_prefix|>",),),
    ),
    "cohere_command4": Markers(
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>", "<|START_TEXT|>", "<|START_RESPONSE|>"),
        breaks=("<|START_ACTION|>",),
        stripped=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        is_inside=True,
        is_special=True,
        template_variable="reasoning",
        hints=(("<|START_THINKING|>",),),
    ),
    "inkling": Markers(
        starts=("<|content_thinking|>", "<|message_model|><|content_thinking|>"),
        ends=("<|end_message|>", "<|message_model|><|content_text|>", "<|content_text|>"),
        stripped=(
            "<|message_model|><|content_text|>",
            "<|content_text|>",
            "<|content_model_end_sampling|>",
        ),
        is_special=True,
        hints=(("<|content_thinking|>",),),
    ),
    "muse": Markers(
        starts=(
            "to=self<|message|>",
            " to=self<|message|>",
            "<|start|>assistant to=self<|message|>",
        ),
        ends=(
            "<|eom|>",
            "<|start|>assistant to=user<|message|>",
            " to=user<|message|>",
            "to=user<|message|>",
        ),
        stripped=(
            "<|start|>assistant to=user<|message|>",
            " to=user<|message|>",
            "to=user<|message|>",
            "<|eot|>",
        ),
        is_special=True,
        hints=(("to=self", "<|eom|>"),),
    ),
    "k2_horizon": Markers(
        starts=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ends=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        breaks=("<ifm|tool_calls>", "<ifm|tool_call>"),
        is_special=True,
        hints=(("<ifm|think",),),
    ),
    "mistral": Markers(
        starts=("[THINK]",),
        ends=("[/THINK]",),
        breaks=("[TOOL_CALLS]",),
        is_special=True,
        template_variable="reasoning_effort",
        is_on_by_default=False,
        hints=(("[THINK]",),),
    ),
    "kimi_k2": Markers(
        breaks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        template_variable="thinking",
        hints=(("<think>", "<|tool_calls_section_begin|>"),),
    ),
    "deepseek-v4": Markers(
        template_variable="thinking",
        is_on_by_default=False,
        breaks=("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", "<｜DSML｜ calls>"),
        hints=(("<think>", "｜DSML｜"),),
    ),
    "deepseek-v3": Markers(
        breaks=("<｜tool▁calls▁begin｜>",),
        template_variable="thinking",
        is_on_by_default=False,
        hints=(("</think>", "<｜Assistant｜>", "thinking"),),
    ),
    "deepseek-r1": Markers(
        is_inside=True, hints=(("<think>", "<｜Assistant｜>"), ("</think>", "<｜Assistant｜>"))
    ),
    "step3": Markers(is_inside=True, hints=(("<think>", "<｜tool_calls_begin｜>"),)),
    "hunyuan": Markers(
        ends=("</think>", "<answer>"),
        breaks=("<tool_calls>",),
        stripped=("<answer>", "</answer>"),
        template_variable="enable_thinking",
        hints=(("<think>", "<answer>"), ("<think>", "<tool_sep>")),
    ),
    "granite": Markers(
        starts=("<think>", "Here is my thought process:", "Here's my thought process:"),
        ends=("</think>", "Here is my response:", "Here's my response:", "<response>"),
        breaks=("<|tool_call|>",),
        stripped=("<response>", "</response>"),
        template_variable="thinking",
        is_on_by_default=False,
        hints=(("<|start_of_role|>", "<think>"), ("<|start_of_role|>", "thought process")),
    ),
    "glm45": Markers(
        breaks=_TOOL_CALL, template_variable="enable_thinking", hints=(("<think>", "<arg_key>"),)
    ),
    "interns1": Markers(
        breaks=("<|action_start|>", "<tool_call>"),
        template_variable="enable_thinking",
        hints=(("<think>", "<|action_start|>"),),
    ),
    "minimax": Markers(
        is_inside=True,
        breaks=("<minimax:tool_call>",),
        hints=(("<think>", "<minimax:tool_call>"),),
    ),
    "seed_oss": Markers(
        starts=("<seed:think>",),
        ends=("</seed:think>",),
        breaks=("<seed:tool_call>",),
        hints=(("<seed:think>",),),
    ),
    "qwen3": Markers(
        breaks=_TOOL_CALL,
        template_variable="enable_thinking",
        hints=(("<think>", "enable_thinking"),),
    ),
    "qwen3-thinking": Markers(
        is_inside=True, breaks=_TOOL_CALL, hints=(("<think>", "<|im_start|>assistant\\n<think>"),)
    ),
    "step3p5": _FORCED,
    "gigachat35": Markers(is_inside=True, breaks=("<｜GCML｜tool_calls>",)),
    "deepseek-v41": Markers(
        template_variable="thinking", is_on_by_default=False, breaks=("<｜DSML｜ calls>",)
    ),
    "nemotron_3": _QWEN3,
    "nemotron": _QWEN3,
    "granite_thinking_parser": Markers(
        breaks=("<tool_call>", "<|tool_call|>"), template_variable="thinking"
    ),
    "mimo": _OPT_IN,
    "poolside_v1": _OPT_IN,
    "dots": Markers(breaks=("<dots_function_call>",), template_variable="enable_thinking"),
    "nanbeige": _QWEN3,
    "ling3": _QWEN3,
    "iquest_q1": Markers(breaks=("<iquest_tool_call>",), template_variable="enable_thinking"),
    "minimax-append-think": Markers(
        is_inside=True, target="radixlm.text.reasoning.markup:AppendThink"
    ),
}

# values of --reasoning-parser
CHOICES = ("auto", "none", "response_template", *MARKERS)
