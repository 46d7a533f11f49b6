"""Older place of ``sglang.srt.utils.hf_transformers_utils``."""

from sglang.srt.utils.hf_transformers_utils import get_config as get_config
from sglang.srt.utils.hf_transformers_utils import get_processor as get_processor
from sglang.srt.utils.hf_transformers_utils import get_tokenizer as get_tokenizer
