"""Every environment variable that RadixLM reads, typed, in one place.

``env.HEALTH_CHECK_TIMEOUT_S.get()`` returns the value or the default. An alias is SGLang's (or the
platform's) name of the same setting; RadixLM's name has precedence.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from radixlm.base.errors import ConfigError

T = TypeVar("T")

_BOOLS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLS |= {"0": False, "false": False, "no": False, "off": False, "": False}


def read_bool(text: str) -> bool:
    """1/true/yes/on or 0/false/no/off/empty; ValueError otherwise."""
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise ValueError("not one of 1, true, yes, on, 0, false, no, off") from None


def read_seconds(text: str) -> float:
    """A finite number of seconds above 0; ValueError otherwise."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("not above 0")
    return seconds


def read_limit(text: str) -> float:
    """Seconds; 0 for no limit, as every number up to 0; ValueError for what is no number."""
    return max(0.0, float(text))


def read_count(text: str) -> int:
    """A whole number from 0 on; ValueError otherwise."""
    count = int(text)
    if count < 0:
        raise ValueError("below 0")
    return count


def read_interval(text: str) -> int:
    """A whole number from 1 on; ValueError otherwise."""
    count = int(text)
    if count < 1:
        raise ValueError("below 1")
    return count


def read_strict_level(text: str) -> int:
    """0, 1 or 2; ValueError otherwise."""
    if text.strip() not in ("0", "1", "2"):
        raise ValueError("not 0, 1 or 2")
    return int(text)


def read_names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_template_source(text: str) -> str:
    """model or reference; ValueError otherwise."""
    if text not in ("model", "reference"):
        raise ValueError("not model or reference")
    return text


def read_route(text: str) -> str:
    """A path that begins with a slash; ValueError otherwise."""
    if not text.startswith("/"):
        raise ValueError("does not begin with '/'")
    return text


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One variable. ``read`` turns its text into a value and raises ValueError if it cannot."""

    name: str
    default: T
    read: Callable[[str], T]
    help: str
    aliases: tuple[str, ...] = ()

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The value in ``environ`` (os.environ); ConfigError naming a malformed variable."""
        environ = os.environ if environ is None else environ
        for name in (self.name, *self.aliases):
            text = environ.get(name)
            if text is None:
                continue
            try:
                return self.read(text)
            except ValueError as error:
                raise ConfigError(
                    f"environment variable {name}={text!r}: {error}; "
                    f"leave it out for {self.default!r}"
                ) from error
        return self.default


PROFILER_DIR = Variable(
    "RADIXLM_PROFILER_DIR",
    Path(tempfile.gettempdir()),
    Path,
    "Folder for profiles; output_dir of /start_profile must be in it.",
    ("SGLANG_TORCH_PROFILER_DIR",),
)
EXPERT_RECORDER_DIR = Variable(
    "RADIXLM_EXPERT_RECORDER_DIR",
    Path(tempfile.gettempdir()),
    Path,
    "Folder of the files of /dump_expert_distribution_record.",
    ("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",),
)
HICACHE_FILE_DIR = Variable(
    "RADIXLM_HICACHE_DIR",
    "",
    str,
    "Folder of --hicache-storage-backend file and shared_file.",
    ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",),
)
WEIGHTS_KEY = Variable(
    "RADIXLM_WEIGHTS_KEY",
    "",
    str,
    "Key of weights that lie elsewhere: bearer token, Redis password.",
)
REMOTE_CACHE_DIR = Variable(
    "RADIXLM_REMOTE_CACHE",
    "~/.cache/radixlm/remote",
    str,
    "Folder for config and tokenizer of models at http(s)://, s3://, redis:// and instance://.",
)
HF3FS_CONFIG_PATH = Variable(
    "SGLANG_HICACHE_HF3FS_CONFIG_PATH",
    "",
    str,
    "JSON file with file_path_prefix and file_size, for --hicache-storage-backend hf3fs.",
)
MOONCAKE_CONFIG_PATH = Variable(
    "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
    "",
    str,
    "JSON file of Mooncake's settings, for --hicache-storage-backend mooncake.",
)
MOONCAKE_MASTER = Variable("MOONCAKE_MASTER", "", str, "host:port of mooncake_master.")
MOONCAKE_METADATA = Variable(
    "MOONCAKE_TE_META_DATA_SERVER", "", str, "Mooncake's metadata server; P2PHANDSHAKE when empty."
)
MOONCAKE_LOCAL_HOSTNAME = Variable(
    "MOONCAKE_LOCAL_HOSTNAME", "", str, "Name of this host in a Mooncake cluster."
)
MOONCAKE_SEGMENT_SIZE = Variable(
    "MOONCAKE_GLOBAL_SEGMENT_SIZE", "", str, "Memory that each rank gives to the cluster: 4gb."
)
MOONCAKE_PROTOCOL = Variable("MOONCAKE_PROTOCOL", "", str, "Mooncake's transport: tcp or rdma.")
MOONCAKE_DEVICE = Variable("MOONCAKE_DEVICE", "", str, "RDMA devices of Mooncake, with commas.")
LMCACHE_CONFIG_FILE = Variable(
    "LMCACHE_CONFIG_FILE", "", str, "LMCache's YAML file, for --enable-lmcache."
)
LMCACHE_REMOTE_URL = Variable(
    "LMCACHE_REMOTE_URL", "", str, "Server of LMCache, lm://host:port, for --enable-lmcache."
)
PP_LAYER_PARTITION = Variable(
    "RADIXLM_PP_LAYER_PARTITION",
    "",
    str,
    "Layers of each pipeline stage, such as 14,14; by their cost unless given.",
    ("SGLANG_PP_LAYER_PARTITION",),
)
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET",
    False,
    read_bool,
    "Triton's own: its kernels run on CPU tensors, statement by statement. For tests.",
)
ALLOW_LONGER_CONTEXT = Variable(
    "RADIXLM_ALLOW_LONGER_CONTEXT",
    False,
    read_bool,
    "Let --context-length exceed the model's maximum.",
    ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",),
)
RETURN_ORIGINAL_LOGPROB = Variable(
    "RADIXLM_RETURN_ORIGINAL_LOGPROB",
    False,
    read_bool,
    "Log-probabilities of output tokens are those before the temperature.",
    ("SGLANG_RETURN_ORIGINAL_LOGPROB",),
)
CPU_ISA = Variable(
    "RADIXLM_CPU_ISA",
    "",
    str,
    "Instruction set of the CPU kernels; the best that the CPU has when empty.",
)
CPU_THREADS_BIND = Variable(
    "RADIXLM_CPU_THREADS_BIND",
    "",
    str,
    "Cores of each engine process of this host, such as 0-31|32-63: one part for each rank.",
    ("SGLANG_CPU_OMP_THREADS_BIND",),
)
HEALTH_CHECK_TIMEOUT_S = Variable(
    "RADIXLM_HEALTH_CHECK_TIMEOUT_S",
    20.0,
    read_seconds,
    "Seconds that /health_generate waits for a token.",
    ("SGLANG_HEALTH_CHECK_TIMEOUT",),
)
# longer than clients and proxies keep idle connections (5 to 60 s): where the server is the first
# to close one, it may do so just as the next request is under way
KEEP_ALIVE_S = Variable(
    "RADIXLM_KEEP_ALIVE_S",
    75,
    read_count,
    "Seconds that an idle connection of a client stays open.",
    ("SGLANG_TIMEOUT_KEEP_ALIVE",),
)
MAX_NEW_TOKENS_LIMIT = Variable(
    "RADIXLM_MAX_NEW_TOKENS_LIMIT",
    0,
    read_count,
    "Tokens that an answer has at most, whatever its request asks for; 0: no such limit.",
    ("SGLANG_MAX_NEW_TOKENS_LIMIT",),
)
DEFAULT_THINKING: Variable[bool | None] = Variable(
    "RADIXLM_DEFAULT_THINKING",
    None,
    read_bool,
    "Whether a model reasons in chats that say nothing about it; the template decides unless set.",
    ("SGLANG_DEFAULT_THINKING", "SGLANG_ENABLE_THINKING"),
)
MAX_THINK_TOKENS = Variable(
    "RADIXLM_MAX_THINK_TOKENS",
    -1,
    int,
    "Tokens of reasoning that a request has at most unless it sets a bound; below 0: no limit.",
    ("SGLANG_MAX_THINK_TOKENS",),
)
MAX_OUTPUT_ESTIMATE = Variable(
    "RADIXLM_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    4096,
    read_count,
    "Output tokens of a running request for which admission keeps pages free, at most.",
    ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",),
)
TOOL_STRICT_LEVEL = Variable(
    "RADIXLM_TOOL_STRICT_LEVEL",
    0,
    read_strict_level,
    "What a grammar holds of calls that the model is free to make (tool_choice auto): 0, those of "
    "strict tools; 1, also the names of all functions; 2, also their arguments.",
    ("SGLANG_TOOL_STRICT_LEVEL",),
)
IMAGE_MAX_PIXELS = Variable(
    "RADIXLM_IMAGE_MAX_PIXELS",
    0,
    read_count,
    "Most pixels of an image of Qwen-VL and its relatives, which make larger ones smaller; 0: as "
    "the checkpoint says.",
    ("SGLANG_IMAGE_MAX_PIXELS",),
)
LOGGING_CONFIG_PATH = Variable(
    "RADIXLM_LOGGING_CONFIG_PATH",
    "",
    str,
    "JSON file for logging.config.dictConfig, in the place of --log-level and --log-format.",
    ("SGLANG_LOGGING_CONFIG_PATH",),
)
QUEUE_TIMEOUT_S = Variable(
    "RADIXLM_QUEUE_TIMEOUT_S",
    0.0,
    read_limit,
    "Seconds that a request may wait before it runs, then it ends with status 503; 0: no limit.",
    ("SGLANG_REQ_WAITING_TIMEOUT",),
)
RUNNING_TIMEOUT_S = Variable(
    "RADIXLM_RUNNING_TIMEOUT_S",
    0.0,
    read_limit,
    "Seconds that a request may run, then it ends with status 503; 0: no limit.",
    ("SGLANG_REQ_RUNNING_TIMEOUT",),
)
TEST_RETRACT = Variable(
    "RADIXLM_TEST_RETRACT",
    False,
    read_bool,
    "Retract one of several running requests now and then, without need. For tests.",
    ("SGLANG_TEST_RETRACT",),
)
TEST_RETRACT_INTERVAL = Variable(
    "RADIXLM_TEST_RETRACT_INTERVAL",
    3,
    read_interval,
    "Steps from one such retraction to the next.",
    ("SGLANG_TEST_RETRACT_INTERVAL",),
)
TEST_RETRACT_NO_PREFILL_BS = Variable(
    "RADIXLM_TEST_RETRACT_NO_PREFILL_BS",
    1 << 31,
    read_interval,
    "With such retractions: while more requests run, none of those that wait starts.",
    ("SGLANG_TEST_RETRACT_NO_PREFILL_BS",),
)
HEALTH_GENERATES = Variable(
    "RADIXLM_HEALTH_GENERATES",
    False,
    read_bool,
    "Let /health send a token through the model, as /health_generate does.",
    ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",),
)
LOG_REQUEST_HEADERS: Variable[tuple[str, ...]] = Variable(
    "RADIXLM_LOG_REQUEST_HEADERS",
    (),
    read_names,
    "Headers that --log-requests writes beside x-smg-routing-key, with commas.",
    ("SGLANG_LOG_REQUEST_HEADERS",),
)
LOG_REQUEST_EXCEEDED_MS = Variable(
    "RADIXLM_LOG_REQUEST_EXCEEDED_MS",
    -1,
    int,
    "Of requests that took less, --log-requests writes no end.",
    ("SGLANG_LOG_REQUEST_EXCEEDED_MS",),
)
DISABLE_OPENAPI_DOC = Variable(
    "RADIXLM_DISABLE_OPENAPI_DOC",
    False,
    read_bool,
    "Serve neither /openapi.json nor /docs.",
    ("DISABLE_OPENAPI_DOC",),
)
VERTEX_ROUTE = Variable(
    "AIP_PREDICT_ROUTE",
    "/vertex_generate",
    read_route,
    "Route of Vertex AI predictions.",
)
LANG_TEMPLATE = Variable(
    "RADIXLM_LANG_TEMPLATE",
    "model",
    read_template_source,
    "Where programs of the frontend language take the chat template from: model, its own; or "
    "reference, the one that SGLang has for the model's path.",
)
HOST_IP = Variable(
    "RADIXLM_HOST_IP",
    "",
    str,
    "Address at which other servers fetch KV from this one; found out when empty.",
    ("SGLANG_HOST_IP", "HOST_IP"),
)
TRANSFER_WAIT_S = Variable(
    "RADIXLM_TRANSFER_WAIT_S",
    300.0,
    read_seconds,
    "Seconds that a decode server waits for a prefill server that is alive, then it computes.",
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT",),
)
TRANSFER_RETRY_S = Variable(
    "RADIXLM_TRANSFER_RETRY_S",
    5.0,
    read_seconds,
    "Seconds before a decode server asks a prefill server again that has failed.",
    ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",),
)
TRANSFER_BUFFER_MB = Variable(
    "RADIXLM_TRANSFER_BUFFER_MB",
    1024,
    int,
    "Most memory in MB for pages that a prefill server has computed and decode servers fetch.",
)
WEIGHT_GROUP_TIMEOUT_S = Variable(
    "RADIXLM_WEIGHT_GROUP_TIMEOUT_S",
    600.0,
    read_seconds,
    "Seconds that a group of /init_weights_update_group waits for its trainer, each time.",
)
USE_MODELSCOPE = Variable(
    "RADIXLM_USE_MODELSCOPE",
    False,
    read_bool,
    "Look for models by name on ModelScope instead of Hugging Face.",
    ("SGLANG_USE_MODELSCOPE",),
)
MODELSCOPE_CACHE = Variable(
    "MODELSCOPE_CACHE", "~/.cache/modelscope/hub", str, "Folder of ModelScope's downloads."
)
MODELSCOPE_DOMAIN = Variable(
    "MODELSCOPE_DOMAIN", "www.modelscope.cn", str, "Host of ModelScope, or a URL."
)
MODELSCOPE_API_TOKEN = Variable(
    "MODELSCOPE_API_TOKEN", "", str, "Token for private models of ModelScope."
)
HF_HUB_OFFLINE = Variable(
    "HF_HUB_OFFLINE", False, read_bool, "Use downloaded models alone, ask no hub."
)
CUDA_VISIBLE_DEVICES: Variable[str | None] = Variable(
    "CUDA_VISIBLE_DEVICES", None, str, "GPUs that the driver shows to this process."
)

VARIABLES: tuple[Variable[object], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
"""All of the above, in order, for the docs."""
