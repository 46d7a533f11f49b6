"""The thinking of each family: its markers, whether a message begins inside, how it is switched."""

from __future__ import annotations

from radixlm.base.record import Record

_TOOL_CALL = ("<tool_call>",)


class Markers(Record):
    """``starts`` and ``ends``: the first of each is the one templates use.

    ``breaks`` end the thinking too but stay in the text (a tool call begins); the thinking goes
    on behind ``resume``. ``silent`` markers are left out of the text. ``is_inside``: messages
    begin with thinking, whether or not a start marker is written. ``switch``: the template
    variable that turns thinking on and off, ``is_on`` its default.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    breaks: tuple[str, ...] = ()
    resume: str = ""
    silent: tuple[str, ...] = ()
    is_inside: bool = False
    is_special: bool = False
    switch: str | None = None
    is_on: bool = True
    hints: tuple[tuple[str, ...], ...] = ()
    target: str = "radixlm.text.reasoning.markup:MarkupReasoning"


_FORCED = Markers(is_inside=True)
_QWEN3 = Markers(breaks=_TOOL_CALL, switch="enable_thinking")
_OPT_IN = Markers(breaks=_TOOL_CALL, switch="enable_thinking", is_on=False)

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
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        is_inside=True,
        is_special=True,
        switch="thinking",
        hints=(("<|open|>", "<|sep|>"),),
    ),
    "minimax-m3": Markers(starts=("<mm:think>",), ends=("</mm:think>",), hints=(("<mm:think>",),)),
    "gemma4": Markers(
        starts=("<|channel>thought\n", "<|channel>thought", "<|channel>"),
        ends=("<channel|>",),
        breaks=("<|tool_call>",),
        is_special=True,
        switch="enable_thinking",
        is_on=False,
        hints=(("<|channel>", "<channel|>"),),
    ),
    "apertus2509": Markers(
        starts=("<|inner_prefix|>",),
        ends=("<|inner_suffix|>",),
        breaks=("<|tools_prefix|>",),
        resume="<|tools_suffix|>",
        is_special=True,
        switch="enable_thinking",
        is_on=False,
        hints=(("<|inner_prefix|>",),),
    ),
    "cohere_command4": Markers(
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>", "<|START_TEXT|>", "<|START_RESPONSE|>"),
        breaks=("<|START_ACTION|>",),
        silent=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        is_inside=True,
        is_special=True,
        switch="reasoning",
        hints=(("<|START_THINKING|>",),),
    ),
    "inkling": Markers(
        starts=("<|content_thinking|>", "<|message_model|><|content_thinking|>"),
        ends=("<|end_message|>", "<|message_model|><|content_text|>", "<|content_text|>"),
        silent=(
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
        silent=(
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
        switch="reasoning_effort",
        is_on=False,
        hints=(("[THINK]",),),
    ),
    "kimi_k2": Markers(
        breaks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        switch="thinking",
        hints=(("<think>", "<|tool_calls_section_begin|>"),),
    ),
    "deepseek-v4": Markers(
        switch="thinking",
        is_on=False,
        breaks=("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", "<｜DSML｜ calls>"),
        hints=(("<think>", "｜DSML｜"),),
    ),
    "deepseek-v3": Markers(
        breaks=("<｜tool▁calls▁begin｜>",),
        switch="thinking",
        is_on=False,
        hints=(("</think>", "<｜Assistant｜>", "thinking"),),
    ),
    "deepseek-r1": Markers(
        is_inside=True, hints=(("<think>", "<｜Assistant｜>"), ("</think>", "<｜Assistant｜>"))
    ),
    "step3": Markers(is_inside=True, hints=(("<think>", "<｜tool_calls_begin｜>"),)),
    "hunyuan": Markers(
        ends=("</think>", "<answer>"),
        breaks=("<tool_calls>",),
        silent=("<answer>", "</answer>"),
        switch="enable_thinking",
        hints=(("<think>", "<answer>"), ("<think>", "<tool_sep>")),
    ),
    "granite": Markers(
        starts=("<think>", "Here is my thought process:", "Here's my thought process:"),
        ends=("</think>", "Here is my response:", "Here's my response:", "<response>"),
        breaks=("<|tool_call|>",),
        silent=("<response>", "</response>"),
        switch="thinking",
        is_on=False,
        hints=(("<|start_of_role|>", "<think>"), ("<|start_of_role|>", "thought process")),
    ),
    "glm45": Markers(
        breaks=_TOOL_CALL, switch="enable_thinking", hints=(("<think>", "<arg_key>"),)
    ),
    "interns1": Markers(
        breaks=("<|action_start|>", "<tool_call>"),
        switch="enable_thinking",
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
        breaks=_TOOL_CALL, switch="enable_thinking", hints=(("<think>", "enable_thinking"),)
    ),
    "qwen3-thinking": Markers(
        is_inside=True, breaks=_TOOL_CALL, hints=(("<think>", "<|im_start|>assistant\\n<think>"),)
    ),
    "step3p5": _FORCED,
    "gigachat35": Markers(is_inside=True, breaks=("<｜GCML｜tool_calls>",)),
    "deepseek-v41": Markers(switch="thinking", is_on=False, breaks=("<｜DSML｜ calls>",)),
    "nemotron_3": _QWEN3,
    "nemotron": _QWEN3,
    "granite_thinking_parser": Markers(breaks=("<tool_call>", "<|tool_call|>"), switch="thinking"),
    "mimo": _OPT_IN,
    "poolside_v1": _OPT_IN,
    "dots": Markers(breaks=("<dots_function_call>",), switch="enable_thinking"),
    "nanbeige": _QWEN3,
    "ling3": _QWEN3,
    "iquest_q1": Markers(breaks=("<iquest_tool_call>",), switch="enable_thinking"),
    "minimax-append-think": Markers(
        is_inside=True, target="radixlm.text.reasoning.markup:AppendThink"
    ),
}
