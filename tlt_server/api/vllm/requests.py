"""vLLM's requests as SGLang's, once they were held against their tables (`tlt_server/api/fields/vllm.py`)."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Body = dict[str, Any]

RENAMED = {"include_stop_str_in_output": "no_stop_trim", "request_id": "rid"}
"""Of vLLM's fields, for SGLang's OpenAI routes."""
NATIVE = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Of vLLM's sampling parameters, for SGLang's `/generate`."""
OF_THE_ANSWER = {"logprobs", "prompt_logprobs", "output_kind", "skip_reading_prefix_cache"}
"""Sampling parameters of vLLM's that change no sample, which SGLang's have no place for."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says that SGLang's has no field for.

    logprobs: how many of the likeliest tokens are named for each position, beside the sampled one; None: no logprobs.
    prompt_logprobs: likewise for the prompt. echo: whether the prompt comes before the response.
    return_tokens_as_token_ids: tokens are named `token_id:N`.
    truncate_prompt_tokens: how many of a prompt's tokens are kept, -1: as many as fit; truncation_side: what goes.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    spaces_between_special_tokens: bool = True

    @property
    def of_prompt(self) -> bool:
        """Whether it asks for logprobs of the prompt."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    @property
    def most(self) -> int:
        """Of how many of the likeliest tokens SGLang is to tell."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    def keep(self, prompt: list[int], room: int) -> list[int]:
        """What is left of a prompt. room: how many tokens fit."""
        kept = room if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if kept is None or kept >= len(prompt):
            return prompt
        return prompt[-kept:] if self.truncation_side == "left" else prompt[:kept]


def asked_by(body: Body) -> Asked:
    """Of the body of a completion or a chat."""
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):  # a chat's
        logprobs = body.get("top_logprobs", 0) if logprobs else None
    return msgspec.convert({**body, "logprobs": logprobs}, Asked)


def asked_of_tokens(body: Body) -> Asked:
    """Of the body of `/inference/v1/generate`, whose tokens are named by their ids alone."""
    params = body.get("sampling_params", {})
    return msgspec.convert({**params, **body, "return_tokens_as_token_ids": True}, Asked)


def openai(body: Body, context: int) -> Body:
    """The body of a completion or a chat, for SGLang's models, which pass over names that they do not know. context:
    tokens, beyond which nobody is refused for asking."""
    grammar = _grammar(body)
    if schema := grammar.pop("json_schema", None):
        form = {"name": "structured_outputs", "schema": json.loads(schema)}
        grammar["response_format"] = {"type": "json_schema", "json_schema": form}
    lengths = {name: min(body[name], context) for name in ("max_tokens", "max_completion_tokens") if body.get(name)}
    return _renamed(body, RENAMED) | lengths | grammar


def native(body: Body, context: int) -> Body:
    """The body of `/inference/v1/generate` as one of `/generate`. context: tokens, the most of a response that asks for
    no length; the caller cuts it to what is left."""
    given = body.get("sampling_params", {})
    params = {"max_new_tokens": context} | _renamed(given, NATIVE) | _grammar(given)
    asked = {
        "input_ids": body["token_ids"],
        "sampling_params": {name: value for name, value in params.items() if name not in OF_THE_ANSWER},
        "rid": body.get("request_id"),
        "extra_key": body.get("cache_salt"),
        "priority": body.get("priority"),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _renamed(body: Body, names: Mapping[str, str]) -> Body:
    renamed = {names.get(name, name): value for name, value in body.items() if name != "structured_outputs"}
    return renamed | ({"top_k": -1} if body.get("top_k") == 0 else {})


def _grammar(body: Body) -> Body:
    """SGLang's grammar of `structured_outputs`: a regex, JSON schema or EBNF."""
    wanted = body.get("structured_outputs", {})
    if regex := wanted.get("regex"):
        return {"regex": regex}
    if schema := wanted.get("json"):
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if wanted.get("json_object"):
        return {"json_schema": '{"type": "object"}'}
    if grammar := wanted.get("grammar"):
        return {"ebnf": grammar}
    return {}
