"""Deprecated flags, accepted with one warning and mapped to today's options."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class DeprecatedFlag:
    """``to`` is the option that replaces it, or "" if there is none (``note`` says why).

    ``value`` is the option's new value; None passes on the deprecated flag's value. ``like`` names
    an option whose value is copied.
    """

    to: str
    value: Any = None
    like: str = ""
    note: str = ""

    @property
    def takes_value(self) -> bool:
        """Whether the flag is followed by a value."""
        return bool(self.to) and self.value is None and not self.like


_GRAPHS = "graphs of short prompts are on unless --disable-prefill-cuda-graph is given"
_NAN = "the check is off unless --enable-nan-detection is given"

DEPRECATED: Mapping[str, DeprecatedFlag] = MappingProxyType(
    {
        "enable_ep_moe": DeprecatedFlag("ep_size", like="tp_size"),
        "enable_deepep_moe": DeprecatedFlag("moe_a2a_backend", "deepep"),
        "enable_flashinfer_cutlass_moe": DeprecatedFlag("moe_runner_backend", "flashinfer_cutlass"),
        "enable_flashinfer_cutedsl_moe": DeprecatedFlag("moe_runner_backend", "flashinfer_cutedsl"),
        "enable_flashinfer_trtllm_moe": DeprecatedFlag("moe_runner_backend", "flashinfer_trtllm"),
        "enable_triton_kernel_moe": DeprecatedFlag("moe_runner_backend", "triton_kernel"),
        "enable_flashinfer_mxfp4_moe": DeprecatedFlag("moe_runner_backend", "flashinfer_mxfp4"),
        "disable_flashinfer": DeprecatedFlag("attention_backend", "triton"),
        "disable_flashinfer_sampling": DeprecatedFlag("sampling_backend", "pytorch"),
        "schedule_heuristic": DeprecatedFlag("schedule_policy"),
        "file_storage_pth": DeprecatedFlag("file_storage_path"),
        "enable_piecewise_cuda_graph": DeprecatedFlag("", note=_GRAPHS),
        "disable_nan_detection": DeprecatedFlag("", note=_NAN),
    }
)
