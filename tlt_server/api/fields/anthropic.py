"""Anthropic's messages, as SGLang takes them."""

from tlt_server.api.fields.field import HONOURED, NONE, Body, Server, Table
from tlt_server.api.fields.field import Field as F
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import SAMPLING
from tlt_server.api.fields.openai import MODEL, is_messages
from tlt_server.api.fields.values import Count, Object, is_bounded, is_positive, is_schema
from tlt_server.errors import BadRequest


def _messages(body: Body, server: Server) -> None:
    if body.get("messages") is None:
        raise BadRequest("messages: missing")


_TEMPLATED = (
    MODEL,
    F("messages", HONOURED, list[Object], "", is_messages),
    F("system", HONOURED, str | list[Object], "", is_bounded),
    F("thinking", HONOURED, Object, "by templates that know it", is_bounded),
    F("tool_choice", HONOURED, Object, "", is_bounded),
    F("tools", HONOURED, list[Object], "", is_schema),
    F("output_config", HONOURED, Object, "by templates that know it", is_bounded),
    F("betas", NONE, list[str]),
)
MESSAGES = Table(
    "AnthropicMessagesRequest",
    [
        *_TEMPLATED,
        *(SAMPLING.fields[name] for name in ("temperature", "top_p", "top_k")),
        F("max_tokens", HONOURED, Count, "", is_positive),
        SAMPLING.fields["stop"]._replace(name="stop_sequences", type=list[str]),
        F("metadata", NONE, Object, "", is_bounded),
        F("stream", NONE, bool),
    ],
    [FOREIGN],
    _messages,
)
COUNT_TOKENS = Table("AnthropicCountTokensRequest", _TEMPLATED, [FOREIGN], _messages)
