"""vLLM's requests, under `--dialect vllm`: SGLang's of the same route with what vLLM has beside them, and its own."""

from typing import Literal

from tlt_server.api.fields import openai, values
from tlt_server.api.fields.field import HONOURED, NONE, REFUSED, Body, Field, Server, Table, fields
from tlt_server.api.fields.field import Field as F
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import (
    GENERATE,
    GENERATED_TOKENS,
    MAX_ROLLOUTS,
    REMEMBERED,
    SAMPLING,
    UNENDED,
    is_continued,
)
from tlt_server.api.fields.patterns import is_grammar, is_pattern
from tlt_server.engine.requests.continued import GENERATED
from tlt_server.errors import BadRequest

NOT_STREAMED = ("return_tokens_as_token_ids", "prompt_logprobs", "return_weight_versions")
GRAMMARS = ("regex", "json", "json_object", "grammar")
SGLANG_GRAMMARS = ("regex", "ebnf", "json_schema", "response_format")


def is_top_k(value: int, server: Server) -> None:
    if value != 0:
        values.is_top_k(value, server)


def is_kept(value: int, server: Server) -> None:
    if value != -1:
        values.is_positive(value, server)


def is_json(value: str | values.Object, server: Server) -> None:
    """A JSON schema, as text or as an object."""
    if isinstance(value, str):
        values.is_schema_text(value, server)
    else:
        values.is_schema(value, server)


def _one_kind(given: Body, server: Server) -> None:
    asked = [name for name in GRAMMARS if given.get(name)]
    if len(asked) > 1:
        raise BadRequest(f"{asked[1]}: beside {asked[0]}, and a request has one grammar")


STRUCTURED = Table(
    "StructuredOutputsParams",
    [
        F("regex", HONOURED, str, "", is_pattern),
        F("json", HONOURED, str | values.Object, "a schema", is_json),
        F("json_object", HONOURED, bool),
        F("grammar", HONOURED, str, "EBNF", is_grammar),
        *fields("choice structural_tag whitespace_pattern", REFUSED, note="not served: use regex, json or grammar"),
        *fields("disable_fallback disable_any_whitespace disable_additional_properties", REFUSED),
    ],
    [FOREIGN],
    _one_kind,
)
TOP_K = F("top_k", HONOURED, values.Whole, "-1 and 0 are the whole vocabulary", is_top_k, neutral=(-1, 0))
SAMPLED = (
    TOP_K,
    F("structured_outputs", HONOURED, values.Object, "regex, json, json_object or grammar", inner=STRUCTURED),
    *fields("include_stop_str_in_output spaces_between_special_tokens", NONE, bool, "of the text"),
    F("prompt_logprobs", NONE, values.Count, "at temperature 1", values.is_top_logprobs),
)
PROMPTED = (
    F("truncate_prompt_tokens", HONOURED, values.Whole, "-1: to the context", is_kept),
    F("truncation_side", HONOURED, Literal["left", "right"], "left, which keeps the end, if not given"),
    *fields("return_tokens_as_token_ids return_weight_versions", NONE, bool),
    F("request_id", NONE, values.Name, "", values.is_new_rid),
)


def _grammar(body: Body) -> bool:
    return any((body.get("structured_outputs") or {}).get(name) for name in GRAMMARS)


def _ends(body: Body) -> None:
    if body.get("min_tokens") and _grammar(body):
        raise BadRequest(f"min_tokens: {UNENDED}")


def _is_of_vllm(body: Body, server: Server) -> None:
    """Across the fields of completions and chat, beside SGLang's own rule."""
    _ends(body)
    if _grammar(body):
        for name in SGLANG_GRAMMARS:
            if body.get(name) not in (None, "", {"type": "text"}):
                raise BadRequest(f"{name}: beside structured_outputs, and a request has one grammar")
    for name in NOT_STREAMED if body.get("stream") else ():
        if body.get(name, False) is not False:  # 0 asks for something
            raise BadRequest(f"{name}: not in a stream. Leave stream out")
    if body.get("echo") and body.get("truncate_prompt_tokens") is not None:
        raise BadRequest("echo: beside truncate_prompt_tokens, and the text would be of the whole prompt")
    if body.get("request_id") and body.get("rid"):
        raise BadRequest("rid: beside request_id, which is vLLM's name of it")


def _beside(sglangs: Table, *added: Field) -> Table:
    def rule(body: Body, server: Server) -> None:
        _is_of_vllm(body, server)
        if sglangs.rule:
            sglangs.rule(body | {"rid": body.get("request_id") or body.get("rid")}, server)

    rows = sglangs.fields | {field.name: field for field in added}
    return Table(sglangs.name, rows.values(), [sglangs.others], rule)


COMPLETION = _beside(openai.COMPLETION, *SAMPLED, *PROMPTED)
CHAT = _beside(openai.CHAT, *SAMPLED, *PROMPTED)
TOKENIZE = _beside(openai.TOKENIZE, F("return_token_strs", NONE, bool))
DETOKENIZE = openai.DETOKENIZE


def _samples(params: Body, server: Server) -> None:
    _ends(params)


PARAMS = Table(
    "SamplingParams",
    [
        *(SAMPLING.fields[name] for name in ("stop", "stop_token_ids", "temperature", "top_p", "min_p", "n")),
        *(SAMPLING.fields[name] for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        *(SAMPLING.fields[name] for name in ("ignore_eos", "skip_special_tokens", "logit_bias")),
        SAMPLING.fields["max_new_tokens"]._replace(
            name="max_tokens", note="what is left of the context, if not given", check=values.is_positive
        ),
        SAMPLING.fields["min_new_tokens"]._replace(name="min_tokens"),
        SAMPLING.fields["sampling_seed"]._replace(name="seed"),
        *SAMPLED,
        F("logprobs", NONE, values.Count, "", values.is_top_logprobs),
        F("output_kind", NONE, Literal[0, 1, 2], "the answer is the whole output"),
        F("skip_reading_prefix_cache", NONE, bool),
        F("flat_logprobs", REFUSED),
    ],
    [{"sampling_seed": F("sampling_seed", REFUSED, note="here it is seed")}, FOREIGN],
    _samples,
)


def _generates(body: Body, server: Server) -> None:
    if body.get("token_ids") is None:
        raise BadRequest("token_ids: missing")
    params = body.get("sampling_params", {})
    samples = params.get("n") or 1
    if samples > MAX_ROLLOUTS:
        raise BadRequest(f"sampling_params.n: {samples}: at most {MAX_ROLLOUTS}")
    is_continued(body.get(GENERATED) or 0, len(body["token_ids"]), params, "min_tokens", "max_tokens")


TOKENS = Table(
    "GenerateRequest",
    [
        F("token_ids", HONOURED, list[int], "the prompt", values.is_prompt_ids),
        F("sampling_params", HONOURED, values.Object, "", inner=PARAMS),
        GENERATED_TOKENS._replace(type=values.Count),
        *REMEMBERED,
        openai.MODEL,
        F("request_id", NONE, values.Name, "", values.is_new_rid),
        F("cache_salt", NONE, values.Name, "of the prefix cache"),
        GENERATE.fields["priority"],
        *fields("return_token_ids return_weight_versions", NONE, bool),
        F("output_mode", NONE, Literal["tokens"]),
        F("stream", REFUSED, note="not served here: /v1/completions streams"),
        *fields("features content_parts", REFUSED, note="this server takes tokens"),
    ],
    [
        {field.name: F(field.name, REFUSED, note="goes into sampling_params") for field in PARAMS.fields.values()},
        FOREIGN,
    ],
    _generates,
)
