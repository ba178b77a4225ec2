"""Which requests each route takes, and the routes that this server does not serve."""

from collections.abc import Mapping

from tlt_server.api.fields import anthropic, native, openai, scores
from tlt_server.api.fields.field import Table

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
EMBEDDING = {"/encode", "/classify", "/v1/embeddings", "/v1/classify"}
"""Of models that embed; a model that generates refuses them."""
UNSERVED: Mapping[str, str] = {
    "/vertex_generate": "use /generate",
    "/api/chat": "use /v1/chat/completions",
    "/api/generate": "use /generate or /v1/completions",
    "/v1/responses": "it would keep every response for ever: use /v1/chat/completions",
    "/v1/audio/transcriptions": "this server takes text",
    "/v1/realtime": "this server takes text",
}
"""Dialects of others for which there is no table: refused with 404, as is what lies below them."""


def unserved(path: str) -> str | None:
    """Why a route is refused; None where it is not."""
    return next((why for route, why in UNSERVED.items() if path == route or path.startswith(f"{route}/")), None)
