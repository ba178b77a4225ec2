"""Requests of OpenAI's kind whose answers are numbers: embeddings, classes, scores, ranks."""

from typing import Any, Literal

from tlt_server.api.fields import values
from tlt_server.api.fields.field import HONOURED, NONE, REFUSED, Body, Server, Table, fields
from tlt_server.api.fields.field import Field as F
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import GENERATE, MAX_ROLLOUTS
from tlt_server.api.fields.openai import MODEL, PRIORITY, USER
from tlt_server.errors import BadRequest

RID_LIST = F("rid", NONE, values.Name | list[values.Name], "", values.is_new_rid)
EMBEDDING = Table(
    "EmbeddingRequest",
    [
        F("input", HONOURED, str | list[str | int | list[int]], "of a multimodal model: /encode", values.is_prompt),
        MODEL,
        F("encoding_format", NONE, Literal["float", "base64"]),
        F("dimensions", HONOURED, values.Count, "", values.is_positive),
        USER,
        RID_LIST,
        PRIORITY,
        GENERATE.fields["lora_path"],
        *fields("embed_override_token_id embed_overrides", REFUSED, Any, "not served"),
    ],
    [FOREIGN],
)
CLASSIFY = Table(
    "ClassifyRequest",
    [F("input", HONOURED, str | list[str | int], "", values.is_prompt), MODEL, USER, RID_LIST, PRIORITY],
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
        F("query", HONOURED, str | list[int], "", values.is_prompt),
        F("items", HONOURED, str | list[str | list[int]], "", values.is_prompt),
        F("label_token_ids", HONOURED, list[int], "", values.is_prompt_ids),
        *fields("apply_softmax item_first", HONOURED, bool),
        F("return_pooled_hidden_states", NONE, bool, needs="embedding"),
        MODEL,
        *fields("embed_override_token_id query_embed_overrides item_embed_overrides", REFUSED, Any, "not served"),
    ],
    [FOREIGN],
    _scores,
)


RERANK = Table(
    "V1RerankReqInput",
    [
        F("query", HONOURED, str, "", values.is_text),
        F("documents", HONOURED, list[str], "", values.is_text),
        F("instruct", HONOURED, str, "", values.is_text),
        F("top_n", NONE, values.Count, "", values.is_positive),
        F("return_documents", NONE, bool),
    ],
    [{"model": MODEL}, FOREIGN],
)
