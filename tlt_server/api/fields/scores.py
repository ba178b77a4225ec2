"""Requests of OpenAI's kind whose answers are numbers: embeddings, classes, scores, ranks."""

from typing import Any, Literal

from tlt_server.api.fields.field import Body, Effect, Field, Server, Table
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import GENERATE, MAX_ROLLOUTS
from tlt_server.api.fields.openai import MODEL, PRIORITY, USER
from tlt_server.api.fields.values import (
    Count,
    Name,
    is_new_rid,
    is_positive,
    is_prompt,
    is_prompt_ids,
    is_text,
)
from tlt_server.errors import BadRequest

HONOURED, REFUSED, NONE = Effect.HONOURED, Effect.REFUSED, Effect.NONE
F = Field
RID_LIST = F("rid", NONE, Name | list[Name], "", is_new_rid)
OVERRIDES = "not served"
EMBEDDING = Table(
    "EmbeddingRequest",
    [
        F("input", HONOURED, str | list[str | int | list[int]], "of a multimodal model: /encode", is_prompt),
        MODEL,
        F("encoding_format", NONE, Literal["float", "base64"]),
        F("dimensions", HONOURED, Count, "", is_positive),
        USER,
        RID_LIST,
        PRIORITY,
        GENERATE.fields["lora_path"],
        *(F(name, REFUSED, Any, OVERRIDES) for name in ("embed_override_token_id", "embed_overrides")),
    ],
    [FOREIGN],
)
CLASSIFY = Table(
    "ClassifyRequest",
    [F("input", HONOURED, str | list[str | int], "", is_prompt), MODEL, USER, RID_LIST, PRIORITY],
    [FOREIGN],
)


def _scores(body: Body, server: Server) -> None:
    query, items = body.get("query"), body.get("items")
    for name in ("query", "items", "label_token_ids"):
        if not body.get(name):
            raise BadRequest(f"{name}: missing, or empty")
    if isinstance(items, list) and len(items) > MAX_ROLLOUTS:
        raise BadRequest(f"items: {len(items)} of them: at most {MAX_ROLLOUTS}")
    first = items[0] if isinstance(items, list) and items else items
    if isinstance(query, str) != isinstance(first, str):
        raise BadRequest("items: texts and a text, or token ids and token ids")


SCORE = Table(
    "ScoringRequest",
    [
        F("query", HONOURED, str | list[int], "", is_prompt),
        F("items", HONOURED, str | list[str | list[int]], "", is_prompt),
        F("label_token_ids", HONOURED, list[int], "", is_prompt_ids),
        F("apply_softmax", HONOURED, bool),
        F("item_first", HONOURED, bool),
        F("return_pooled_hidden_states", NONE, bool, needs="embedding"),
        MODEL,
        *(
            F(name, REFUSED, Any, OVERRIDES)
            for name in ("embed_override_token_id", "query_embed_overrides", "item_embed_overrides")
        ),
    ],
    [FOREIGN],
    _scores,
)


RERANK = Table(
    "V1RerankReqInput",
    [
        F("query", HONOURED, str, "", is_text),
        F("documents", HONOURED, list[str], "", is_text),
        F("instruct", HONOURED, str, "", is_text),
        F("top_n", NONE, Count, "", is_positive),
        F("return_documents", NONE, bool),
    ],
    [{"model": MODEL}, FOREIGN],
)
