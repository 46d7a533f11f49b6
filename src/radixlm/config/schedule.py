"""Token budgets, queue limits, order, priorities, deadlines."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import ABOVE_ZERO, AUTO, NON_NEGATIVE, POSITIVE, Flag, Group, no_op

MIN_WINDOW = 16  # tokens of a streaming window
SCHEDULE_POLICIES = (
    *("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key"),
    *("shortest-prefill-first", "hrrn"),
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScheduleConfig(Group):
    """Scheduling."""

    max_running_requests: Annotated[
        int,
        "Maximum number of requests in a batch; 64 on a CPU, 256 on a GPU when unset.",
        Flag(within=POSITIVE),
    ] = AUTO
    max_queued_requests: Annotated[
        int | None,
        "Maximum number of waiting requests; others get 429 or 503. No limit when unset.",
        Flag(within=POSITIVE),
    ] = None
    chunked_prefill_size: Annotated[
        int,
        "Maximum tokens of a prompt in one step; 2048 on a CPU, 8192 on a GPU when unset; "
        "-1 disables chunking. On a CPU chunks behind a long context get shorter, so that a step "
        "takes no longer than the first.",
        Flag(within="[-1, inf)"),
    ] = AUTO
    max_prefill_tokens: Annotated[
        int,
        "Maximum prompt tokens of all requests in one step; at least the context length.",
        Flag(within=POSITIVE),
    ] = 16384
    schedule_policy: Annotated[
        str,
        "Order of the queue: first come, longest cached prefix, depth first by weight, longest "
        "output, random, by the request's priority, first those whose routing key "
        "(x-smg-routing-key) most running requests have, fewest uncached prompt tokens, or longest "
        "wait for each of those (hrrn).",
        Flag(choices=SCHEDULE_POLICIES),
    ] = "fcfs"
    enable_priority_scheduling: Annotated[bool, "Requests with a higher 'priority' go first."] = (
        False
    )
    schedule_low_priority_values_first: Annotated[
        bool,
        "Lower priority values go first instead.",
        Flag(part_of=("enable_priority_scheduling",)),
    ] = False
    default_priority_value: Annotated[
        int, "Priority of requests that name none.", Flag(part_of=("enable_priority_scheduling",))
    ] = 0
    abort_on_priority_when_disabled: Annotated[
        bool, "Refuse requests with a priority while --enable-priority-scheduling is off."
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        "A waiting request preempts a running one if their priorities differ by more than this.",
        Flag(within=NON_NEGATIVE),
    ] = 10
    schedule_conservativeness: Annotated[
        float,
        "How much space is reserved for running requests to grow; raise it if many are retracted.",
        Flag(within=NON_NEGATIVE),
    ] = 1.0
    fair_share: Annotated[
        str | None,
        "Header whose value identifies a user. Users take turns, and so do the calls of a user. "
        "Unset: the API key, or else the address, identifies the user.",
    ] = None
    request_timeout_s: Annotated[
        float | None,
        "Seconds after which a request is aborted, queueing included. No limit when unset.",
        Flag(within=ABOVE_ZERO),
    ] = None
    stream_interval: Annotated[
        int, "Tokens between two chunks of a stream.", Flag(within=POSITIVE)
    ] = 1
    enable_mixed_chunk: Annotated[
        bool,
        "Let prompts and decodes share a step.",
        no_op("prompts and decodes always share a step"),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        "Plan each step after the results of the previous one, without overlap.",
        Flag(only_device="cuda"),
    ] = False
    target_itl_ms: Annotated[
        float | None,
        "Milliseconds between two tokens of running requests: chunks of prompts beside them get so "
        "short that a step takes no longer, or with --pp-size n so many steps. Unset: on a CPU, "
        "beside streams, five times what they take without prompts and 50 at least; else chunks of "
        "--chunked-prefill-size.",
        Flag(within="(0, inf)"),
    ] = None
    streaming_window: Annotated[
        int | None,
        "Streams may go on for ever: a request sees its first tokens and so many of its last at "
        "most. Requests choose with the field streaming_window, 0 for none. Unset: none.",
        Flag(within=POSITIVE),
    ] = None
    streaming_sinks: Annotated[
        int, "First tokens that a streaming window keeps.", Flag(within=POSITIVE)
    ] = 4
    num_continuous_decode_steps: Annotated[
        int | None,
        "Tokens that requests decode between two checks of the queue; on one CPU device they are "
        "one step of the engine. Unset: 1, and on a CPU up to 16 that take 4 ms together.",
        Flag(within=POSITIVE),
    ] = None
    scheduler_recv_interval: Annotated[
        int,
        "Steps between two checks for new requests.",
        no_op("the scheduler is woken by messages", POSITIVE),
    ] = 1
    sleep_on_idle: Annotated[
        bool, "Use no CPU while idle.", no_op("an idle server always sleeps")
    ] = False
