"""SGLang's own requests: `/generate`, its sampling parameters, `/encode` and `/classify`."""

from typing import Any

from tlt_server.api.fields import values
from tlt_server.api.fields.field import HONOURED, NONE, REFUSED, Body, Server, Table, fields
from tlt_server.api.fields.field import Field as F
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.patterns import is_grammar, is_pattern, is_stop_patterns
from tlt_server.engine.requests.continued import GENERATED
from tlt_server.engine.requests.remembered import HISTORY, NAMESPACE, Mode
from tlt_server.errors import BadRequest

MAX_SAMPLES, MAX_ROLLOUTS = 1024, 16_384
INTERNAL = "SGLang's own"
MEDIA = "multimodal"
UNSERVED_SESSIONS = "not served: send the whole prompt, of which the cache finds what it has seen"
UNENDED = "beside a grammar, which may allow nothing but the end: a response has no token then. Say it in the grammar"


def one_grammar(params: Body, server: Server) -> None:
    """Among others, what upstream finds out too late."""
    given = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if params.get(name)]
    if len(given) > 1:
        raise BadRequest(f"{given[1]}: beside {given[0]}, and a request has one grammar")
    if given and params.get("min_new_tokens"):
        raise BadRequest(f"min_new_tokens: {UNENDED}")


SAMPLING = Table(
    "SamplingParams",
    [
        F("max_new_tokens", HONOURED, values.Count),
        F("min_new_tokens", HONOURED, values.Count, neutral=(0,)),
        F("stop", HONOURED, values.Texts, check=values.is_stops),
        F("stop_token_ids", HONOURED, values.Ids, check=values.is_ids),
        F("stop_regex", HONOURED, values.Texts, "Python's, without repetitions in repetitions", is_stop_patterns),
        F("temperature", HONOURED, values.Warmth, "0 is greedy; up to 1e6", neutral=(1,)),
        F("top_p", HONOURED, values.Share, check=values.is_positive, neutral=(1,)),
        F("top_k", HONOURED, values.Whole, "-1 is the whole vocabulary", values.is_top_k, neutral=(-1,)),
        F("min_p", HONOURED, values.Share, neutral=(0,)),
        *fields("frequency_penalty presence_penalty", HONOURED, values.Penalty, neutral=(0,)),
        F("repetition_penalty", HONOURED, float, "of the response's tokens alone", values.is_up_to(2), neutral=(1,)),
        F("n", HONOURED, values.Count, f"up to {MAX_SAMPLES}", values.is_up_to(MAX_SAMPLES), neutral=(1,)),
        F("json_schema", HONOURED, str, "JSON, as text", values.is_schema_text),
        F("regex", HONOURED, str, "", is_pattern),
        F("ebnf", HONOURED, str, "", is_grammar),
        F("structural_tag", HONOURED, str, "JSON, as text", values.is_schema_text),
        F("ignore_eos", HONOURED, bool),
        *fields("skip_special_tokens spaces_between_special_tokens no_stop_trim", NONE, bool, "of the text"),
        F("stream_interval", NONE, values.Count, "", values.is_positive),
        F("logit_bias", HONOURED, dict[str, float], "by token id", values.is_bias),
        F("sampling_seed", HONOURED, values.Seed, "64 bits; drawn if not given", values.is_seed),
        F("custom_params", NONE, values.Params, "for a custom logit processor", values.is_custom),
        *fields("stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized", REFUSED, Any, INTERNAL),
    ],
    [{"seed": F("seed", REFUSED, note="here it is sampling_seed")}, FOREIGN],
    one_grammar,
    nulls=True,
)

GENERATED_TOKENS = F(
    GENERATED, HONOURED, values.Counts, "of a response that goes on: how many of the last ids are its own", neutral=(0,)
)
REMEMBERED = (
    F(
        HISTORY,
        NONE,
        Mode,
        "none, read, write or both: whether earlier responses draft, and this one will",
        neutral=("both",),
    ),
    F(NAMESPACE, NONE, values.Name, "of the history: prompts of another one are other prompts"),
)
PD = "of disaggregation"
SHARED = (
    F("rid", NONE, values.Names, "", values.is_new_rid),
    F("lora_path", HONOURED, values.Names, needs="lora"),
    F("routing_key", NONE, str),
    F("priority", NONE, values.Whole),
    *fields("background log_metrics return_prompt_token_ids", NONE, bool),
    F("modalities", HONOURED, list[str | None], needs=MEDIA),
    *fields("image_data video_data audio_data", HONOURED, Any, "", values.is_bounded, needs=MEDIA),
    *fields(
        "lora_id http_worker_ipc positional_embed_overrides external_trace_header received_time"
        " multi_item_delimiter_indices",
        REFUSED,
        Any,
        INTERNAL,
    ),
)
GENERATE_FIELDS = (
    *SHARED,
    F("text", HONOURED, values.Texts, "", values.is_text),
    F("input_ids", HONOURED, values.IdsOrLists, "", values.is_prompt_ids),
    F("input_embeds", HONOURED, list[list[float | list[float]]], "", values.is_embeds, needs="embeds"),
    F("sampling_params", HONOURED, values.Objects, "an object, or one for each prompt", inner=SAMPLING),
    GENERATED_TOKENS,
    *REMEMBERED,
    F("session_id", NONE, values.Name),
    F("session_params", REFUSED, values.Object, UNSERVED_SESSIONS),
    F("return_logprob", NONE, values.Flags),
    *fields("return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64", NONE, bool),
    *fields("stream no_logs", NONE, bool),
    F("logprob_start_len", NONE, values.Whole | list[values.Whole | None], "-1: of the response alone", neutral=(-1,)),
    F("top_logprobs_num", NONE, values.Counts, "", values.is_top_logprobs),
    F("token_ids_logprob", NONE, values.IdsOrLists, "", values.is_ids),
    F("return_sampling_mask", NONE, values.Flags, needs="plain"),
    F("return_hidden_states", NONE, values.States, needs="states"),
    F("return_routed_experts", NONE, bool, needs="experts"),
    F("routed_experts_start_len", NONE, values.Count),
    F("return_indexer_topk", NONE, bool, needs="indexer"),
    F("custom_logit_processor", HONOURED, values.Names, needs="plain"),
    F("require_reasoning", HONOURED, bool, needs="reasoning"),
    F("max_thinking_tokens", HONOURED, values.Count, needs="thinking"),
    F("extra_key", NONE, values.Names, "of the prefix cache"),
    F("custom_labels", NONE, dict[str, str], "", values.is_labels),
    F("conversation_id", NONE, str),
    F("routed_dp_rank", NONE, values.Count, "", values.is_replica),
    F("disagg_prefill_dp_rank", NONE, values.Count, PD),
    *fields("bootstrap_host bootstrap_pair_key", NONE, values.Names, PD),
    *fields("bootstrap_port decode_tp_size", NONE, values.Counts, PD),
    F("bootstrap_room", NONE, values.Long | list[values.Long | None], PD),
    F("mm_hashes", HONOURED, list[str | list[str]], needs=MEDIA),
    F("use_audio_in_video", HONOURED, bool, needs=MEDIA),
    F("images_config", HONOURED, values.Object, "", values.is_bounded, needs=MEDIA),
    *fields("max_dynamic_patch min_dynamic_patch", HONOURED, values.Count, needs=MEDIA),
    *fields("image_max_dynamic_patch video_max_dynamic_patch", HONOURED, values.Count, needs=MEDIA),
    *fields("return_bytes return_entropy need_wait_for_mm_inputs num_items_assigned", REFUSED, Any, INTERNAL),
    *fields("mm_data_mooncake encoder_urls", REFUSED, Any, INTERNAL),
)
PER_PROMPT = (
    *("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"),
    *("return_hidden_states", "lora_path", "custom_logit_processor", "extra_key", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "bootstrap_pair_key", "decode_tp_size", GENERATED),
)


EXPANDED = {"rid", "sampling_params", "lora_path", "extra_key", "return_hidden_states", GENERATED}
"""Of these, those that upstream, or we, spread over the samples of each prompt."""


def fits_together(body: Body, server: Server) -> None:
    """One prompt and single values; or several, and a list is of as many values."""
    prompts = [name for name in ("text", "input_ids", "input_embeds") if body.get(name) is not None]
    if len(prompts) != 1:
        raise BadRequest("text, input_ids or input_embeds: one of them")
    prompt = body[prompts[0]]
    several = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
    if several and prompts[0] == "input_embeds":
        several = isinstance(prompt[0][0], list)
    count = len(prompt) if several else 1
    samples = _samples(body.get("sampling_params"))
    if several and not prompt:
        raise BadRequest(f"{prompts[0]}: a batch without a prompt")
    if count * samples > MAX_ROLLOUTS:
        raise BadRequest(f"sampling_params.n: {count} prompts, {samples} samples of each: at most {MAX_ROLLOUTS}")
    for name in PER_PROMPT:
        _is_per_prompt(name, body.get(name), count if several else 0, samples)
    ids = body.get("token_ids_logprob")  # of these only lists of lists are one for each prompt
    _is_per_prompt("token_ids_logprob", ids and isinstance(ids[0], list) and ids, count if several else 0, samples)
    if isinstance(body.get("rid"), str) and several:
        values.is_new_rid([f"{body['rid']}_{i}" for i in range(count)], server)
    _continues(body, prompt if several else [prompt])


def _continues(body: Body, prompts: list[Any]) -> None:
    counts, params = (_each(body.get(name), len(prompts)) for name in (GENERATED, "sampling_params"))
    if any(counts) and body.get("input_ids") is None:
        raise BadRequest(f"{GENERATED}: counts input_ids, and the prompt is not given so")
    for generated, sampling, prompt in zip(counts, params, prompts, strict=True):
        is_continued(generated or 0, len(prompt), sampling or {}, "min_new_tokens", "max_new_tokens")


def _each(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * count


def is_continued(generated: int, length: int, params: Body, minimum: str, maximum: str) -> None:
    """Of one prompt: the tokens that were sampled before are some of its ids, and with them no more are asked for at
    least than at most. minimum, maximum: as the dialect calls them. Raises BadRequest."""
    if generated and generated >= length:
        raise BadRequest(f"{GENERATED}: {generated}, of {length} input ids: a prompt must come before them")
    least, most = params.get(minimum), params.get(maximum)
    if least is not None and most is not None and least > generated + most:
        beside = f" and the {generated} generated tokens" if generated else ""
        raise BadRequest(f"sampling_params.{minimum}: {least} is more than {maximum}, {most}{beside}")


def _samples(params: Any) -> int:
    each = [one.get("n") or 1 for one in params or [{}]] if isinstance(params, list | None) else [params.get("n") or 1]
    if len(set(each)) > 1:
        raise BadRequest("sampling_params: n differs within a batch")
    return each[0] if each else 1


def _is_per_prompt(name: str, value: Any, count: int, samples: int) -> None:
    """count: of prompts; 0: not a batch."""
    if not isinstance(value, list):
        return
    if not count:
        raise BadRequest(f"{name}: a list, beside a single prompt")
    if len(value) != count:
        raise BadRequest(f"{name}: a list of {len(value)}, beside {count} prompts")
    if samples > 1 and name not in EXPANDED:
        raise BadRequest(f"{name}: a list, beside {samples} samples of each prompt")
    if name in ("rid", "sampling_params", "extra_key") and None in value:
        raise BadRequest(f"{name}: null within a list")
    if name == "rid" and len(set(value)) < len(value):
        raise BadRequest("rid: one id twice")


MISPLACED = {
    field.name: F(field.name, REFUSED, note="goes into sampling_params", neutral=field.neutral)
    for field in SAMPLING.fields.values()
}
MISPLACED["seed"] = F("seed", REFUSED, note="here it is sampling_seed, and goes into sampling_params")
GENERATE = Table("GenerateReqInput", GENERATE_FIELDS, [MISPLACED, FOREIGN], fits_together)
SAMPLING.others |= {
    field.name: F(field.name, REFUSED, note="goes beside sampling_params, not into it")
    for field in GENERATE_FIELDS
    if field.effect is not NONE or field.name.startswith("return_")
}


def _is_texts(value: Any, server: Server) -> None:
    for each in [value] if isinstance(value, str) else value:
        values.is_text(each, server)


def _embeds_something(body: Body, server: Server) -> None:
    prompts = [name for name in ("text", "input_ids") if body.get(name)]
    if len(prompts) != 1:
        raise BadRequest("text or input_ids: one of them")
    prompt = body[prompts[0]]
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    for name in ("rid", "sampling_params", "lora_path"):
        _is_per_prompt(name, body.get(name), len(prompt) if several else 0, 1)
    if several and isinstance(body.get("rid"), str):
        raise BadRequest("rid: a list, beside several prompts")
    if not isinstance(body.get("sampling_params", {}), dict):
        raise BadRequest("sampling_params: an object")


EMBED = Table(
    "EmbeddingReqInput",
    [
        *SHARED,
        F("text", HONOURED, str | list[str | list[str]], "", _is_texts),
        F("input_ids", HONOURED, values.IdsOrLists, "", values.is_prompt_ids),
        F("sampling_params", NONE, values.Objects, "", values.is_bounded),
        F("is_cross_encoder_request", HONOURED, bool),
        F("dimensions", HONOURED, values.Count),
        F("return_pooled_hidden_states", NONE, bool),
        *fields("input_embeds embed_overrides embed_override_token_id", REFUSED),
    ],
    [FOREIGN],
    _embeds_something,
)
