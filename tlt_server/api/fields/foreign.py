"""Fields of vLLM's, OpenAI's and others' requests that SGLang does not know: those that would change a sample, or ask
for something, are refused; of the rest, those that clients send without meaning anything by it are let pass."""

from tlt_server.api.fields.field import IGNORED, NONE, REFUSED, Field, fields

_REFUSED = {
    # vLLM: grammars
    "not served: use json_schema, regex or ebnf, or OpenAI's response_format": """
        structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding
        guided_decoding_backend guided_whitespace_pattern structural_tag grammar""",
    # vLLM, TGI, llama.cpp: sampling
    "not served: use logit_bias or a grammar": "allowed_token_ids",
    "not served: use logit_bias": "bad_words bad_words_ids",
    "not served: draw n and choose": "best_of",
    "of beam search, which is not served": "length_penalty early_stopping diversity_penalty",
    "not served: temperature, top_k, top_p and min_p are": """
        typical_p top_a tfs epsilon_cutoff eta_cutoff mirostat dynatemp_range smoothing_factor no_repeat_ngram_size
        dry_multiplier""",
    "not served: temperature 0 is greedy": "do_sample",
    "not served: use stop, stop_token_ids or stop_regex": "repetition_detection stop_sequences until",
    "here it is max_new_tokens": "max_length max_tokens max_completion_tokens max_output_tokens",
    "here it is max_tokens": "max_new_tokens",
    "here it is min_new_tokens": "min_tokens",
    "here it is min_tokens": "min_new_tokens",
    "here it is response_format": "json_schema",
    "here it is no_stop_trim": "include_stop_str_in_output",
    # vLLM, OpenAI: the prompt
    "not served: send the prompt as it should be": """
        truncate_prompt_tokens truncation_side prompt_embeds suffix add_special_tokens add_generation_prompt
        chat_template documents""",
    "here it is input_ids": "prompt_token_ids",
    "not served: use tools": "functions",
    "not served: use tool_choice": "function_call",
    # asked of the answer
    "not served: /generate has return_logprob with logprob_start_len 0": "prompt_logprobs",
    "not served: use return_token_ids, or /generate": "return_tokens_as_token_ids",
    "here it is token_ids_logprob of /generate": "logprob_token_ids",
    "not served": """
        logits_processors logits_processor vllm_xargs extra_args use_beam_search num_beams beam_width
        thinking_token_budget mm_processor_kwargs multi_modal_data audio web_search_options verbosity
        kv_transfer_params return_top_p_token_ids detokenize output_kind""",
}
_NEUTRAL: dict[str, tuple[bool | float | str, ...]] = {
    **dict.fromkeys(("best_of", "num_beams", "beam_width", "length_penalty", "typical_p", "tfs"), (1,)),
    **dict.fromkeys(("diversity_penalty", "top_a", "epsilon_cutoff", "eta_cutoff", "mirostat"), (0,)),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "no_repeat_ngram_size", "dry_multiplier"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0,)),
    **dict.fromkeys(("do_sample", "add_special_tokens", "add_generation_prompt", "detokenize"), (True,)),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
}
_WITHOUT_EFFECT = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction request_id
    stream_options"""

FOREIGN: dict[str, Field] = {
    field.name: field
    for field in (
        *(
            Field(name, REFUSED, note=note, neutral=_NEUTRAL.get(name, ()))
            for note, names in _REFUSED.items()
            for name in names.split()
        ),
        *fields("seed sampling_seed", IGNORED),
        *fields(_WITHOUT_EFFECT, NONE),
    )
}
"""By name; a dialect's own field of a name goes first."""
