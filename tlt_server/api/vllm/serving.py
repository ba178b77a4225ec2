"""How vLLM's rollouts go through SGLang: its steps for OpenAI's routes, with vLLM's prompts, answers and errors."""

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import Response
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor
from sglang.srt.managers.io_struct import GenerateReqInput

from tlt_server.api.rollouts.gate import refusal
from tlt_server.api.rollouts.seeds import FIRST_SAMPLE, places
from tlt_server.api.scheduler import as_json
from tlt_server.api.vllm import answers
from tlt_server.api.vllm.requests import Asked

UNDER_WAY: dict[str, list[str]] = {}
"""What this process is answering: SGLang's ids of the prompts, by the request's id as its client knows it."""


def error_of(upstreams: Response, path: str) -> Response:
    """An error of SGLang's, in this dialect."""
    return refusal(path, upstreams.status_code, json.loads(bytes(upstreams.body))["message"])


class Serving(OpenAIServingBase):
    """One request: upstream's `handle_request()` leads it through, and answers what it raises.

    asked: what the request says beside. path: of its route.
    """

    def __init__(self, manager: Any, asked: Asked, path: str) -> None:
        super().__init__(manager)
        self._asked, self._path = asked, path
        eos = manager.tokenizer.eos_token_id if manager.tokenizer else None
        self._ends = {*(manager.model_config.hf_eos_token_id or ()), eos} - {None}

    def create_error_response(self, message: str, err_type: str = "", status_code: int = 400) -> Response:  # noqa: ARG002
        return refusal(self._path, status_code, str(message).split("\n", 1)[0])

    def _with_logprobs(self, adapted: GenerateReqInput) -> GenerateReqInput:
        asked = self._asked
        return replace(
            adapted,
            return_logprob=asked.logprobs is not None or asked.of_prompt,
            logprob_start_len=0 if asked.of_prompt else -1,
            top_logprobs_num=asked.most,
            # a text for each of the likeliest tokens of each position takes long, and holds up all others
            return_text_in_logprobs=asked.logprobs is not None and not asked.return_tokens_as_token_ids,
        )

    async def _handle_non_streaming_request(self, adapted: GenerateReqInput, request: Any, raw: Any) -> Response:
        prompts, spread = _spread(await self._fitting(adapted, raw))
        rid = adapted.rid or uuid4().hex
        rids = [rid] if prompts is None else [f"{rid}_{each[FIRST_SAMPLE]}" for each in spread.sampling_params]
        known = {name for name in (adapted.rid, raw.headers.get("x-request-id")) if name}
        with under_way(known, rids):
            outputs = await anext(
                self.tokenizer_manager.generate_request(replace(spread, rid=rid if prompts is None else rids), raw)
            )
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return self._answer(request, rid, outputs if prompts is None else answers.prompt_major(outputs, prompts))

    @abstractmethod
    def _answer(self, request: Any, rid: str, outputs: list[answers.Output]) -> Response:
        """Of outputs in the order of their prompts, all samples of each together."""

    async def _fitting(self, adapted: GenerateReqInput, raw: Any) -> GenerateReqInput:
        """With prompts as token ids, cut as asked, and no more tokens asked for than the context has room for."""
        if adapted.contains_mm_input():
            return adapted
        manager, ids = self.tokenizer_manager, adapted.input_ids
        if adapted.text is not None:
            ids, _ = await manager._tokenize_texts(adapted.text)
        several = bool(ids) and isinstance(ids[0], list)
        prompts = [self._asked.keep(prompt, manager.max_req_input_len - 1) for prompt in (ids if several else [ids])]
        if not all(prompts):
            raise ValueError("prompt: a prompt without a token")
        room = manager.context_len - manager.num_reserved_tokens
        most = adapted.sampling_params.get("max_new_tokens") or room
        samples = adapted.sampling_params.get("n") or 1
        params = [
            adapted.sampling_params
            | {"max_new_tokens": max(min(most, room - len(each)), 1), FIRST_SAMPLE: place * samples}
            for place, each in zip(places(raw, len(prompts)), prompts, strict=True)
        ]
        if several:
            return replace(adapted, text=None, input_ids=prompts, sampling_params=params)
        return replace(adapted, text=None, input_ids=prompts[0], sampling_params=params[0])


@contextmanager
def under_way(names: set[str], rids: Sequence[str]) -> Iterator[None]:
    """Enters a request into `UNDER_WAY`. Several may have one name; one that is refused for its id has another's."""
    for name in names:
        UNDER_WAY.setdefault(name, []).extend(rids)
    try:
        yield
    finally:
        for name in names:
            for rid in rids:
                UNDER_WAY[name].remove(rid)
            if not UNDER_WAY[name]:
                del UNDER_WAY[name]


def _spread(adapted: GenerateReqInput) -> tuple[int | None, GenerateReqInput]:
    """With samples of several prompts as requests of their own, in rounds of one a prompt: the first round's prefill
    serves the others. Upstream prefills one prompt after the other before any is sampled from. Returns how many prompts
    there are, too; None: one, whose samples are left to upstream."""
    params = adapted.sampling_params
    if not isinstance(params, list) or len(params) == 1:
        return None, adapted
    samples = params[0].get("n") or 1
    alone = [each | {"n": 1, FIRST_SAMPLE: each[FIRST_SAMPLE] + sample} for sample in range(samples) for each in params]
    return len(params), replace(adapted, input_ids=adapted.input_ids * samples, sampling_params=alone)


class OpenAI(Serving):
    """Completions and chats. upstream: SGLang's handler of the route, which makes of a request what is generated and of
    outputs an answer, by `build`; `complete` makes that vLLM's."""

    def __init__(self, upstream: Any, build: Callable[..., Any], complete: Callable[..., Any], asked: Asked, path: str):
        super().__init__(upstream.tokenizer_manager, asked, path)
        self._upstream, self._build, self._complete = upstream, build, complete

    def _request_id_prefix(self) -> str:
        return str(self._upstream._request_id_prefix())

    def _validate_request(self, request: Any) -> Any:
        return self._upstream._validate_request(request)

    def _convert_to_internal_request(self, request: Any, raw: Any) -> tuple[GenerateReqInput, Any]:
        adapted, request = _with_tools(self._upstream, request, raw)
        if not self._asked.spaces_between_special_tokens:
            params = adapted.sampling_params | {"spaces_between_special_tokens": False}
            adapted = replace(adapted, sampling_params=params)
        return adapted if request.stream else self._with_logprobs(adapted), request

    async def _handle_streaming_request(self, adapted: GenerateReqInput, request: Any, raw: Any) -> Response:
        fitting = await self._fitting(adapted, raw)
        answer: Response = await self._upstream._handle_streaming_request(fitting, request, raw)
        return answer if answer.status_code == 200 else error_of(answer, self._path)

    def _answer(self, request: Any, rid: str, outputs: list[answers.Output]) -> Response:  # noqa: ARG002
        none = False if isinstance(request.logprobs, bool) else None  # ours are made of the outputs
        answer = self._build(request.model_copy(update={"logprobs": none}), outputs, int(time.time()))
        if isinstance(answer, Response):
            return error_of(answer, self._path)
        return as_json(self._complete(answer.model_dump(), outputs, self._asked, self._ends))


def _with_tools(upstream: Any, request: Any, raw: Any) -> tuple[GenerateReqInput, Any]:
    """Upstream's request. The prompt tells of tools that may not be called, as vLLM's does; upstream's does not."""
    if getattr(request, "tool_choice", None) != "none" or not request.tools:
        adapted, request = upstream._convert_to_internal_request(request, raw)
        return adapted, request
    adapted, _ = upstream._convert_to_internal_request(request.model_copy(update={"tool_choice": "auto"}), raw)
    params = adapted.sampling_params | {"skip_special_tokens": request.skip_special_tokens}
    if request.response_format is None or request.response_format.type != "structural_tag":
        params.pop("structural_tag", None)  # a tool's, that may not be called
    return replace(adapted, sampling_params=params), request


class Tokens(Serving):
    """`/inference/v1/generate`."""

    def __init__(self, manager: Any, asked: Asked, path: str, model: str) -> None:
        super().__init__(manager, asked, path)
        self._model = model

    def _request_id_prefix(self) -> str:
        return "generate-tokens-"

    def _convert_to_internal_request(self, request: GenerateReqInput, _: Any) -> tuple[GenerateReqInput, Any]:
        adapted = replace(
            self._with_logprobs(request),
            return_prompt_token_ids=self._asked.return_token_ids,
            lora_path=self._resolve_lora_path(self._model, None),
        )
        return adapted, request

    def _answer(self, request: Any, rid: str, outputs: list[answers.Output]) -> Response:  # noqa: ARG002
        samples = len(outputs)
        usage = UsageProcessor.calculate_response_usage(
            outputs, samples, self.tokenizer_manager.server_args.enable_cache_report
        )
        head = {"request_id": rid, "model": self._model, "created": int(time.time()), "usage": usage.model_dump()}
        return as_json(head | answers.tokens(outputs, self._asked, self._ends))
