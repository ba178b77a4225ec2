"""OpenAI's requests as SGLang takes them: completions, chat, embeddings, classification, scoring, ranking, tokens."""

from typing import Any, Literal

from tlt_server.api.fields import values
from tlt_server.api.fields.field import HONOURED, NONE, REFUSED, Body, Server, Table, fields
from tlt_server.api.fields.field import Field as F
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import GENERATE, MAX_ROLLOUTS, MEDIA, PD, REMEMBERED, SAMPLING, UNENDED, one_grammar
from tlt_server.errors import BadRequest

ELSEWHERE = {
    field.name: F(field.name, REFUSED, note="not served here: /generate has it", neutral=field.neutral)
    for table in (GENERATE, SAMPLING)
    for field in table.fields.values()
    if field.effect is HONOURED
}
OTHERS = [{"sampling_seed": F("sampling_seed", REFUSED, note="here it is seed")}, FOREIGN, ELSEWHERE]
MODEL = F("model", NONE, str, "there is one; NAME:ADAPTER needs --enable-lora")
USER = F("user", NONE, str)
RID = F("rid", NONE, values.Name, "", values.is_new_rid)
PRIORITY = F("priority", NONE, values.Whole)


def is_response_format(value: dict[str, Any], server: Server) -> None:
    """text, json_object, json_schema with a schema, or structural_tag."""
    values.is_schema(value, server)
    if value.get("type") not in ("text", "json_object", "json_schema", "structural_tag"):
        raise BadRequest("type: text, json_object, json_schema or structural_tag")
    within = value.get("json_schema")
    if not isinstance(within, dict | None):
        raise BadRequest("json_schema: an object")
    if not isinstance((within or {}).get("schema", value.get("schema")), dict | None):
        raise BadRequest("json_schema.schema: an object")


def is_tools(value: list[dict[str, Any]], server: Server) -> None:
    values.is_schema(value, server)
    for tool in value:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest("function.name: a text")
        if not isinstance(function.get("parameters"), dict | None):
            raise BadRequest("function.parameters: an object")


def is_messages(value: list[dict[str, Any]], server: Server) -> None:
    values.is_bounded(value, server)
    if not value:
        raise BadRequest("a chat without a message")
    for message in value:
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            raise BadRequest("role: a text")
        if not isinstance(content, str | list | None):
            raise BadRequest("content: a text, or a list of parts")
        values.is_text([content] if isinstance(content, str) else _texts(content or []), server)


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
    *(SAMPLING.fields[name] for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "n", "stop")),
    *(SAMPLING.fields[name] for name in ("stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p")),
    *(SAMPLING.fields[name] for name in ("logit_bias", "regex", "ebnf", "no_stop_trim", "ignore_eos")),
    *(SAMPLING.fields[name] for name in ("custom_params", "skip_special_tokens")),
    SAMPLING.fields["min_new_tokens"]._replace(name="min_tokens"),
    SAMPLING.fields["sampling_seed"]._replace(name="seed"),
    *(GENERATE.fields[name] for name in ("stream", "return_hidden_states", "return_routed_experts", "session_id")),
    *(GENERATE.fields[name] for name in ("routed_experts_start_len", "session_params", "routed_dp_rank")),
    *(GENERATE.fields[name] for name in ("disagg_prefill_dp_rank", "images_config", "lora_path")),
    *(MODEL, USER, RID, PRIORITY),
    *REMEMBERED,
    F("data_parallel_rank", NONE, values.Count, "routed_dp_rank is its name", values.is_replica),
    F("custom_logit_processor", HONOURED, values.Name, needs="plain"),
    F("response_format", HONOURED, values.Object, "", is_response_format, neutral=()),
    F("stream_options", NONE, dict[str, bool | None], "include_usage, continuous_usage_stats"),
    *fields("return_cached_tokens_details return_token_ids", NONE, bool),
    *fields("extra_key cache_salt", NONE, values.Name, "of the prefix cache"),
    F("bootstrap_host", NONE, values.Name, PD),
    F("bootstrap_port", NONE, values.Count, PD),
    F("bootstrap_room", NONE, values.Long, PD),
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
        values.is_new_rid([f"{rid}_{i}" for i in range(len(prompt))], server)
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
    given = {name: body.get(name) for name in ("json_schema", "regex", "ebnf")}
    one_grammar(given, server)
    if least and (constrains or any(given.values())):
        raise BadRequest(f"min_tokens: {UNENDED}")
    if constrains and any(given.values()):
        raise BadRequest("response_format: beside another grammar, and a request has one")


COMPLETION = Table(
    "CompletionRequest",
    [
        *SAMPLED,
        F("prompt", HONOURED, str | list[str | int | list[int]], "", values.is_prompt),
        F("max_tokens", HONOURED, values.Count, "16 if not given", values.is_positive),
        F("logprobs", NONE, values.Count, "", values.is_top_logprobs),
        F("echo", NONE, bool),
        GENERATE.fields["custom_labels"],
        F("best_of", REFUSED, values.Count, "draw n and choose", neutral=(1,)),
        F("suffix", HONOURED, str, needs="suffixes"),
        SAMPLING.fields["json_schema"],
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
    F("tools", HONOURED, list[values.Object], "", is_tools),
    F("tool_choice", HONOURED, str | values.Object, "", values.is_bounded),
    F("reasoning_effort", HONOURED, Effort, "by templates that know it"),
    F("chat_template_kwargs", HONOURED, values.Object, "by templates that know it", values.is_template_kwargs),
    F("continue_final_message", HONOURED, bool),
)
CHAT = Table(
    "ChatCompletionRequest",
    [
        *SAMPLED,
        *TEMPLATED,
        F("messages", HONOURED, list[values.Object], "", is_messages),
        F("input_ids", HONOURED, list[int], "the prompt, instead of the template's", values.is_prompt_ids),
        *fields("max_tokens max_completion_tokens", HONOURED, values.Count, "", values.is_positive),
        F("logprobs", NONE, bool),
        F("top_logprobs", NONE, values.Count, "", values.is_top_logprobs),
        F("parallel_tool_calls", HONOURED, bool, neutral=(True,)),
        F("reasoning", HONOURED, values.Object, "effort, enabled; by templates that know it", values.is_bounded),
        F("task", REFUSED, str, "of DeepSeek-V4's encoder"),
        *fields("return_prompt_token_ids return_meta_info separate_reasoning stream_reasoning", NONE, bool),
        *fields("max_dynamic_patch min_dynamic_patch", HONOURED, values.Count, needs=MEDIA),
        F("use_audio_in_video", HONOURED, bool, needs=MEDIA),
    ],
    [
        {"add_special_tokens": F("add_special_tokens", REFUSED, note="not served: templates hold them")},
        {"modalities": F("modalities", NONE)},
        *OTHERS,
    ],
    _chats,
)
TOKENIZE = Table(
    "TokenizeRequest",
    [
        MODEL,
        F("prompt", HONOURED, values.Texts, "", values.is_text),
        F("messages", HONOURED, list[values.Object], "", is_messages),
        F("add_special_tokens", HONOURED, bool),
        *TEMPLATED,
    ],
    [{"add_generation_prompt": F("add_generation_prompt", REFUSED, neutral=(True,))}, FOREIGN],
)
DETOKENIZE = Table(
    "DetokenizeRequest",
    [MODEL, F("tokens", HONOURED, values.IdsOrLists, "", values.is_ids), F("skip_special_tokens", HONOURED, bool)],
    [FOREIGN],
)
