"""vLLM's routes for rollouts and tokens, in the place of SGLang's of the same path."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput, LoadLoRAAdapterReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level

from tlt_server.api.auth import path_of
from tlt_server.api.fields.field import brief
from tlt_server.api.rollouts.gate import refusal
from tlt_server.api.rollouts.scope import PARSED
from tlt_server.api.scheduler import as_json, tokenizer_manager
from tlt_server.api.vllm import answers, requests
from tlt_server.api.vllm.serving import UNDER_WAY, OpenAI, Tokens, error_of
from tlt_server.errors import BadRequest

router = APIRouter()

NO_ADAPTERS = "LoRA adapters are not loaded here: SGLang's /load_lora_adapter does it, of a server with --enable-lora"


class Abort(msgspec.Struct):
    """request_ids: None: all."""

    request_ids: list[str] | None = None


@router.post("/v1/completions")
async def completions(raw: Request) -> Response:
    upstream = raw.app.state.openai_serving_completion
    return await _openai(raw, CompletionRequest, upstream, upstream._build_completion_response, answers.complete)


@router.post("/v1/chat/completions")
async def chat_completions(raw: Request) -> Response:
    upstream = raw.app.state.openai_serving_chat
    return await _openai(raw, ChatCompletionRequest, upstream, upstream._build_chat_response, answers.chat)


async def _openai(raw: Request, kind: Any, upstream: Any, build: Any, complete: Any) -> Response:
    body, manager, path = raw.scope[PARSED], tokenizer_manager(), path_of(raw.scope)
    if (refused := _refused(raw)) is not None:
        return refused
    told = {"model": manager.served_model_name} | requests.openai(body, manager.context_len)
    serving = OpenAI(upstream, build, complete, requests.asked_by(body), path)
    answer: Response = await serving.handle_request(_model(kind, told), raw)
    return answer


@router.post("/inference/v1/generate")
async def generate(raw: Request) -> Response:
    body, manager, path = raw.scope[PARSED], tokenizer_manager(), path_of(raw.scope)
    if (refused := _refused(raw)) is not None:
        return refused
    serving = Tokens(manager, requests.asked_of_tokens(body), path, body.get("model") or manager.served_model_name)
    answer: Response = await serving.handle_request(GenerateReqInput(**requests.native(body, manager.context_len)), raw)
    return answer


@router.post("/abort_requests")
@router.post("/inference/v1/abort_requests")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def abort_requests(raw: Request) -> Response:
    """Ends the requests of these ids, or all, which are answered with what they have; says how many there were."""
    try:
        ids = msgspec.json.decode(await raw.body() or b"{}", type=Abort).request_ids
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(error)) from error
    manager = tokenizer_manager()
    if ids is None:
        count = len([rid for rid in manager.rid_to_state if rid not in manager.child_rid_to_logical_rid])
        manager.abort_request(abort_all=True)
        return as_json({"status": "aborted", "aborted": count})
    known = [name for name in dict.fromkeys(ids) if name in UNDER_WAY or name in manager.rid_to_state]
    for rid in (rid for name in dict.fromkeys(ids) for rid in UNDER_WAY.get(name, [name])):
        manager.abort_request(rid)
    return as_json({"status": "aborted", "aborted": len(known)})


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(raw: Request) -> Response:
    body, manager = raw.scope[PARSED], tokenizer_manager()
    if (refused := _refused(raw)) is not None:
        return refused
    answer = await raw.app.state.openai_serving_tokenize.handle_request(_model(TokenizeRequest, body), raw)
    if isinstance(answer, Response):
        return error_of(answer, path_of(raw.scope))
    told = answer.model_dump() | {"max_model_len": manager.context_len, "token_strs": None}
    if body.get("return_token_strs"):
        told["token_strs"] = _pieces(told["tokens"], manager.tokenizer)
    return as_json(told)


def _pieces(tokens: list[Any], tokenizer: Any) -> list[Any]:
    if tokens and isinstance(tokens[0], list):
        return [_pieces(each, tokenizer) for each in tokens]
    return list(tokenizer.convert_ids_to_tokens(tokens))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(raw: Request) -> Response:
    """Special tokens are told, too, if nothing is said of them: as vLLM does, and SGLang does not."""
    if (refused := _refused(raw)) is not None:
        return refused
    request = _model(DetokenizeRequest, {"skip_special_tokens": False} | raw.scope[PARSED])
    answer = await raw.app.state.openai_serving_detokenize.handle_request(request, raw)
    if isinstance(answer, Response):
        return error_of(answer, path_of(raw.scope))
    return as_json({"prompt": answer.text, "text": answer.text})


@router.post("/v1/load_lora_adapter")
@router.post("/v1/unload_lora_adapter")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def no_adapters(raw: Request) -> Response:
    """404, by which a trainer knows that the server takes no adapters."""
    return refusal(path_of(raw.scope), 404, NO_ADAPTERS)


@router.post("/load_lora_adapter")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load_lora_adapter(obj: Annotated[LoadLoRAAdapterReqInput, Body()], raw: Request) -> Any:
    """SGLang's, where the server takes adapters."""
    from sglang.srt.entrypoints import http_server

    if tokenizer_manager().server_args.enable_lora:
        return await http_server.load_lora_adapter(obj, raw)
    return refusal(path_of(raw.scope), 404, NO_ADAPTERS)


def _refused(raw: Request) -> Response | None:
    """404 for a model that is not served; None for one that is. Raises BadRequest: it is not sent as JSON."""
    manager, path = tokenizer_manager(), path_of(raw.scope)
    kind = raw.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a page of another site can have a browser send is not
        raise BadRequest(f"content-type {brief(kind)!r}: must be application/json")
    model, served = raw.scope[PARSED].get("model"), manager.served_model_name
    adapted = manager.server_args.enable_lora and str(model).startswith(f"{served}:")
    if model in (None, served, manager.server_args.served_model_name) or adapted:
        return None
    return refusal(path, 404, f"model {brief(model)!r}: there is none of this name, but {served!r}")


def _model(kind: Any, body: dict[str, Any]) -> Any:
    """The body as upstream's model. Raises BadRequest: it is none."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
