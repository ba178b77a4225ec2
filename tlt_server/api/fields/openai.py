"""OpenAI's requests as SGLang takes them: completions, chat, embeddings, classification, scoring, ranking, tokens."""

from typing import Any, Literal

from tlt_server.api.fields.field import Body, Effect, Field, Server, Table
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import (
    GENERATE,
    MAX_ROLLOUTS,
    PD,
    SAMPLING,
    one_grammar,
)
from tlt_server.api.fields.values import (
    Count,
    IdsOrLists,
    Long,
    Name,
    Object,
    Texts,
    Whole,
    is_bounded,
    is_ids,
    is_new_rid,
    is_positive,
    is_prompt,
    is_prompt_ids,
    is_replica,
    is_schema,
    is_template_kwargs,
    is_text,
    is_top_logprobs,
)
from tlt_server.errors import BadRequest

HONOURED, REFUSED, NONE, IGNORED = Effect.HONOURED, Effect.REFUSED, Effect.NONE, Effect.IGNORED
F = Field
ELSEWHERE = {
    field.name: Field(field.name, REFUSED, note="not served here: /generate has it", neutral=field.neutral)
    for table in (GENERATE, SAMPLING)
    for field in table.fields.values()
    if field.effect is HONOURED
}
OTHERS = [FOREIGN, ELSEWHERE]
MODEL = F("model", NONE, str, "there is one; NAME:ADAPTER needs --enable-lora")
USER = F("user", NONE, str)
MEDIA = "multimodal"
RID = F("rid", NONE, Name, "", is_new_rid)
PRIORITY = F("priority", NONE, Whole)


def _as(name: str, native: str) -> Field:
    """A sampling parameter under a name of OpenAI's."""
    return SAMPLING.fields[native]._replace(name=name)


def is_response_format(value: dict[str, Any], server: Server) -> None:
    """text, json_object, json_schema with a schema, or structural_tag."""
    is_schema(value, server)
    if value.get("type") not in ("text", "json_object", "json_schema", "structural_tag"):
        raise BadRequest("type: text, json_object, json_schema or structural_tag")
    within = value.get("json_schema")
    if not isinstance(within, dict | None):
        raise BadRequest("json_schema: an object")
    if not isinstance((within or {}).get("schema", value.get("schema")), dict | None):
        raise BadRequest("json_schema.schema: an object")


def is_tools(value: list[dict[str, Any]], server: Server) -> None:
    is_schema(value, server)
    for tool in value:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest("function.name: a text")
        if not isinstance(function.get("parameters"), dict | None):
            raise BadRequest("function.parameters: an object")


def is_messages(value: list[dict[str, Any]], server: Server) -> None:
    is_bounded(value, server)
    if not value:
        raise BadRequest("a chat without a message")
    for message in value:
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            raise BadRequest("role: a text")
        if not isinstance(content, str | list | None):
            raise BadRequest("content: a text, or a list of parts")
        is_text([content] if isinstance(content, str) else _texts(content or []), server)


def _texts(parts: list[Any]) -> list[str]:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRequest("content: a part is an object with a type")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise BadRequest("content: text of a part is a text")
        texts += [part["text"]] if part["type"] == "text" else []
    return texts


SAMPLED = (
    *(_as(name, name) for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "n")),
    *(_as(name, name) for name in ("stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p")),
    *(_as(name, name) for name in ("logit_bias", "regex", "ebnf", "no_stop_trim", "ignore_eos", "custom_params")),
    _as("skip_special_tokens", "skip_special_tokens"),
    _as("min_tokens", "min_new_tokens"),
    _as("seed", "sampling_seed"),
    *(
        GENERATE.fields[name]
        for name in (
            *("stream", "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "session_id"),
            *("session_params", "routed_dp_rank", "disagg_prefill_dp_rank", "images_config", "lora_path"),
        )
    ),
    MODEL,
    USER,
    RID,
    PRIORITY,
    F("data_parallel_rank", NONE, Count, "routed_dp_rank is its name", is_replica),
    F("custom_logit_processor", HONOURED, Name, needs="plain"),
    F("response_format", HONOURED, Object, "", is_response_format, neutral=()),
    F("stream_options", NONE, dict[str, bool | None], "include_usage, continuous_usage_stats"),
    F("return_cached_tokens_details", NONE, bool),
    F("return_token_ids", NONE, bool),
    F("extra_key", NONE, Name, "of the prefix cache"),
    F("cache_salt", NONE, Name, "of the prefix cache"),
    F("bootstrap_host", NONE, Name, PD),
    F("bootstrap_port", NONE, Count, PD),
    F("bootstrap_room", NONE, Long, PD),
)


def _completes(body: Body, server: Server) -> None:
    prompt = body.get("prompt")
    if prompt is None:
        raise BadRequest("prompt: missing")
    if isinstance(prompt, list) and not prompt:
        raise BadRequest("prompt: empty")
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    _few(len(prompt) if several else 1, body)
    rid = body.get("rid")
    if several and isinstance(rid, str):
        is_new_rid([f"{rid}_{i}" for i in range(len(prompt))], server)
    _one_grammar(body, server)


def _few(prompts: int, body: Body) -> None:
    if prompts * (body.get("n") or 1) > MAX_ROLLOUTS:
        raise BadRequest(f"n: {prompts} prompts, {body['n']} samples of each: at most {MAX_ROLLOUTS}")


def _one_grammar(body: Body, server: Server) -> None:
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    least = body.get("min_tokens")
    if least and most and least > most:
        raise BadRequest(f"min_tokens: {least} is more than max_tokens, {most}")
    form = body.get("response_format") or {}
    constrains = form.get("type") not in (None, "text")
    one_grammar({name: body.get(name) for name in ("json_schema", "regex", "ebnf")}, server)
    if constrains and any(body.get(name) for name in ("json_schema", "regex", "ebnf")):
        raise BadRequest("response_format: beside another grammar, and a request has one")


COMPLETION = Table(
    "CompletionRequest",
    [
        *SAMPLED,
        F("prompt", HONOURED, str | list[str | int | list[int]], "", is_prompt),
        F("max_tokens", HONOURED, Count, "16 if not given", is_positive),
        F("logprobs", NONE, Count, "", is_top_logprobs),
        F("echo", NONE, bool),
        GENERATE.fields["custom_labels"],
        F("best_of", REFUSED, Count, "draw n and choose", neutral=(1,)),
        F("suffix", HONOURED, str, needs="suffixes"),
        _as("json_schema", "json_schema"),
    ],
    OTHERS,
    _completes,
)


def _chats(body: Body, server: Server) -> None:
    if body.get("messages") is None:
        raise BadRequest("messages: missing")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("top_logprobs: needs logprobs")
    _few(1, body)
    _one_grammar(body, server)


Effort = float | Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TEMPLATED = (
    F("tools", HONOURED, list[Object], "", is_tools),
    F("tool_choice", HONOURED, str | Object, "", is_bounded),
    F("reasoning_effort", HONOURED, Effort, "by templates that know it"),
    F("chat_template_kwargs", HONOURED, Object, "by templates that know it", is_template_kwargs),
    F("continue_final_message", HONOURED, bool),
)
CHAT = Table(
    "ChatCompletionRequest",
    [
        *SAMPLED,
        *TEMPLATED,
        F("messages", HONOURED, list[Object], "", is_messages),
        F("input_ids", HONOURED, list[int], "the prompt, instead of the template's", is_prompt_ids),
        F("max_tokens", HONOURED, Count, "", is_positive),
        F("max_completion_tokens", HONOURED, Count, "", is_positive),
        F("logprobs", NONE, bool),
        F("top_logprobs", NONE, Count, "", is_top_logprobs),
        F("parallel_tool_calls", HONOURED, bool, neutral=(True,)),
        F("reasoning", HONOURED, Object, "effort, enabled; by templates that know it", is_bounded),
        F("task", REFUSED, str, "of DeepSeek-V4's encoder"),
        F("return_prompt_token_ids", NONE, bool),
        F("return_meta_info", NONE, bool),
        F("separate_reasoning", NONE, bool),
        F("stream_reasoning", NONE, bool),
        *(F(name, HONOURED, Count, needs=MEDIA) for name in ("max_dynamic_patch", "min_dynamic_patch")),
        F("use_audio_in_video", HONOURED, bool, needs=MEDIA),
    ],
    [
        {"add_special_tokens": Field("add_special_tokens", REFUSED, note="not served: templates hold them")},
        {"modalities": Field("modalities", NONE)},
        *OTHERS,
    ],
    _chats,
)
TOKENIZE = Table(
    "TokenizeRequest",
    [
        MODEL,
        F("prompt", HONOURED, Texts, "", is_text),
        F("messages", HONOURED, list[Object], "", is_messages),
        F("add_special_tokens", HONOURED, bool),
        *TEMPLATED,
    ],
    [{"add_generation_prompt": Field("add_generation_prompt", REFUSED, neutral=(True,))}, FOREIGN],
)
DETOKENIZE = Table(
    "DetokenizeRequest",
    [MODEL, F("tokens", HONOURED, IdsOrLists, "", is_ids), F("skip_special_tokens", HONOURED, bool)],
    [FOREIGN],
)
