"""Which requests each route takes, and the routes that this server does not serve."""

from collections.abc import Mapping

from tlt_server.api.fields import anthropic, native, openai, scores, vllm
from tlt_server.api.fields.field import Table
from tlt_server.config import Dialect

TABLES: Mapping[str, Table] = {
    "/generate": native.GENERATE,
    "/encode": native.EMBED,
    "/classify": native.EMBED,
    "/v1/completions": openai.COMPLETION,
    "/v1/chat/completions": openai.CHAT,
    "/invocations": openai.CHAT,
    "/v1/embeddings": scores.EMBEDDING,
    "/v1/classify": scores.CLASSIFY,
    "/v1/score": scores.SCORE,
    "/v1/rerank": scores.RERANK,
    "/v1/tokenize": openai.TOKENIZE,
    "/tokenize": openai.TOKENIZE,
    "/v1/detokenize": openai.DETOKENIZE,
    "/detokenize": openai.DETOKENIZE,
    "/v1/messages": anthropic.MESSAGES,
    "/v1/messages/count_tokens": anthropic.COUNT_TOKENS,
}
"""Of SGLang's dialect."""
VLLM_TABLES: Mapping[str, Table] = {
    "/v1/completions": vllm.COMPLETION,
    "/v1/chat/completions": vllm.CHAT,
    "/inference/v1/generate": vllm.TOKENS,
    "/v1/tokenize": vllm.TOKENIZE,
    "/tokenize": vllm.TOKENIZE,
    "/v1/detokenize": vllm.DETOKENIZE,
    "/detokenize": vllm.DETOKENIZE,
}
"""What vLLM's dialect has instead, or beside."""
EMBEDDING = {"/encode", "/classify", "/v1/embeddings", "/v1/classify"}
"""Of models that embed; a model that generates refuses them."""
RESPONSES = {"/v1/completions", "/v1/chat/completions", "/invocations", "/v1/messages", "/inference/v1/generate"}
"""Of sampled tokens, in answers that do not hold each response's own meta_info."""
_UNSERVED = {
    "use /generate": ("/vertex_generate",),
    "use /v1/chat/completions": ("/api/chat",),
    "use /generate or /v1/completions": ("/api/generate",),
    "it would keep every response for ever: use /v1/chat/completions": ("/v1/responses",),
    "this server takes text": ("/v1/audio/transcriptions", "/v1/realtime"),
    "expert parallelism is not served: no model that speculates here has experts spread over ranks": (
        *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/start_expert_distribution_record"),
        *("/stop_expert_distribution_record", "/dump_expert_distribution_record"),
    ),
    "NGRAM drafting is not served, and so no corpus of its own": (
        *("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
    ),
    "the hierarchical cache keeps KV of weights that are gone; it is not changed while the server runs": (
        *("/clear_hicache_storage_backend", "/hicache/storage-backend"),
    ),
    "weights are not sent to other servers: a rendezvous that nobody joins would stop this one": (
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"),
    ),
    "a session keeps KV from one request to the next, of weights that may be gone by then": (
        *("/open_session", "/close_session"),
    ),
    "an adapter is loaded from a folder, by /load_lora_adapter: this one unpickles": (
        "/load_lora_adapter_from_tensors",
    ),
    "it would have the server sleep, for tests of SGLang's own": ("/slow_down",),
    "a profile ends after its num_steps": ("/stop_profile",),
    "tracing is set at start": ("/set_trace_level",),
    "tensors are not dumped from a server that strangers reach": ("/dumper",),
}
UNSERVED: Mapping[str, str] = {path: why for why, paths in _UNSERVED.items() for path in paths}
"""SGLang's routes that make no sense on this server or cannot be made safe: refused with 404, as is what lies below."""


def tables_of(dialect: Dialect) -> Mapping[str, Table]:
    """The tables of a server, by route."""
    return TABLES if dialect is Dialect.SGLANG else {**TABLES, **VLLM_TABLES}


def unserved(path: str) -> str | None:
    """Why a route is refused; None where it is not."""
    return next((why for route, why in UNSERVED.items() if path == route or path.startswith(f"{route}/")), None)
