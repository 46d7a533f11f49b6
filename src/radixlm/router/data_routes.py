"""Data routes that go to a worker as they are: those of RadixLM, SGLang, vLLM, Ollama,
llama.cpp and TGI."""

from __future__ import annotations

DATA_ROUTES = (
    "/generate",
    "/encode",
    "/classify",
    "/score",
    "/pooling",
    "/rerank",
    "/invocations",
    "/vertex_generate",
    "/tokenize",
    "/detokenize",
    "/separate_reasoning",
    "/parse_function_call",
    "/grammar/check",
    "/grammar/trace",
    "/inference/v1/generate",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/reranking",
    "/v1/reranking",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/moderations",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/completion",
    "/infill",
    "/apply-template",
    "/generate_stream",
    "/v2/embed",
    "/v1/chat/completions/batch",
)
"""Paths of POST."""

GET_ROUTES = (
    "/api/tags", "/api/ps", "/api/version", "/version", "/tokenizer_info", "/props", "/info",
)  # fmt: skip
"""Paths of GET that any worker can answer."""

DISAGGREGATED = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/completion",
    "/infill",
    "/generate_stream",
)
"""Those that generate text, and so need a prefill and a decode worker."""
