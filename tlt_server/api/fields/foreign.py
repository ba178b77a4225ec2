"""Fields of vLLM's, OpenAI's and others' requests that SGLang does not know: those that would change a sample, or ask
for something, are refused; of the rest, those that clients send without meaning anything by it are let pass."""

from tlt_server.api.fields.field import Effect, Field

GRAMMARS = "not served: use json_schema, regex or ebnf, or OpenAI's response_format"
STOPPING = "not served: use stop, stop_token_ids or stop_regex"
ONLY_SAMPLING = "not served: temperature, top_k, top_p and min_p are"
PROMPT_LOGPROBS = "not served: /generate has return_logprob with logprob_start_len 0"
TEMPLATING = "not served: send the prompt as it should be"

_REFUSED: dict[str, tuple[str, tuple[bool | float | str, ...]]] = {
    # vLLM: grammars
    **dict.fromkeys(
        (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "structural_tag",
            "grammar",
        ),
        (GRAMMARS, ()),
    ),
    # vLLM, TGI, llama.cpp: sampling
    "allowed_token_ids": ("not served: use logit_bias or a grammar", ()),
    "bad_words": ("not served: use logit_bias", ()),
    "bad_words_ids": ("not served: use logit_bias", ()),
    "logits_processors": ("not served", ()),
    "logits_processor": ("not served", ()),
    "vllm_xargs": ("not served", ()),
    "extra_args": ("not served", ()),
    "best_of": ("not served: draw n and choose", (1,)),
    "use_beam_search": ("not served", ()),
    "num_beams": ("not served", (1,)),
    "beam_width": ("not served", (1,)),
    "length_penalty": ("of beam search, which is not served", (1,)),
    "early_stopping": ("of beam search, which is not served", ()),
    "diversity_penalty": ("of beam search, which is not served", (0,)),
    "typical_p": (ONLY_SAMPLING, (1,)),
    "top_a": (ONLY_SAMPLING, (0,)),
    "tfs": (ONLY_SAMPLING, (1,)),
    "epsilon_cutoff": (ONLY_SAMPLING, (0,)),
    "eta_cutoff": (ONLY_SAMPLING, (0,)),
    "mirostat": (ONLY_SAMPLING, (0,)),
    "dynatemp_range": (ONLY_SAMPLING, (0,)),
    "smoothing_factor": (ONLY_SAMPLING, (0,)),
    "no_repeat_ngram_size": (ONLY_SAMPLING, (0,)),
    "dry_multiplier": (ONLY_SAMPLING, (0,)),
    "do_sample": ("not served: temperature 0 is greedy", (True,)),
    "repetition_detection": (STOPPING, ()),
    "stop_sequences": (STOPPING, ()),
    "until": (STOPPING, ()),
    "thinking_token_budget": ("not served", ()),
    "max_length": ("here it is max_new_tokens", ()),
    "max_tokens": ("here it is max_new_tokens", ()),
    "max_completion_tokens": ("here it is max_new_tokens", ()),
    "max_output_tokens": ("here it is max_new_tokens", ()),
    "max_new_tokens": ("here it is max_tokens", ()),
    "min_tokens": ("here it is min_new_tokens", (0,)),
    "min_new_tokens": ("here it is min_tokens", (0,)),
    "json_schema": ("here it is response_format", ()),
    "include_stop_str_in_output": ("here it is no_stop_trim", ()),
    # vLLM, OpenAI: the prompt
    "truncate_prompt_tokens": (TEMPLATING, ()),
    "truncation_side": (TEMPLATING, ()),
    "prompt_embeds": (TEMPLATING, ()),
    "prompt_token_ids": ("here it is input_ids", ()),
    "suffix": (TEMPLATING, ()),
    "add_special_tokens": (TEMPLATING, (True,)),
    "add_generation_prompt": (TEMPLATING, (True,)),
    "chat_template": (TEMPLATING, ()),
    "documents": (TEMPLATING, ()),
    "functions": ("not served: use tools", ()),
    "function_call": ("not served: use tool_choice", ("none", "auto")),
    "mm_processor_kwargs": ("not served", ()),
    "multi_modal_data": ("not served", ()),
    "audio": ("not served", ()),
    "web_search_options": ("not served", ()),
    "verbosity": ("not served", ("medium",)),
    "kv_transfer_params": ("not served", ()),
    # asked of the answer
    "prompt_logprobs": (PROMPT_LOGPROBS, ()),
    "return_top_p_token_ids": ("not served", ()),
    "return_tokens_as_token_ids": ("not served: use return_token_ids, or /generate", ()),
    "logprob_token_ids": ("here it is token_ids_logprob of /generate", ()),
    "detokenize": ("not served", (True,)),
    "output_kind": ("not served", ()),
}
_SEEDS = ("seed", "sampling_seed")
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "request_id", "stream_options"),
)

FOREIGN: dict[str, Field] = (
    {name: Field(name, Effect.REFUSED, note=note, neutral=neutral) for name, (note, neutral) in _REFUSED.items()}
    | {name: Field(name, Effect.IGNORED) for name in _SEEDS}
    | {name: Field(name, Effect.NONE) for name in _WITHOUT_EFFECT}
)
"""By name; a dialect's own field of a name goes first."""
