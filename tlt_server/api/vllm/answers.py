"""vLLM's answers, made of SGLang's and of the outputs under it, whose `meta_info` has the ids of all tokens.

A position is `(logprob, token id, text or None)`, as SGLang has it; `best` are the likeliest of one position, in order.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tlt_server.api.vllm.requests import Asked

Output = dict[str, Any]
Position = tuple[float | None, int, str | None]
Best = Sequence[Position] | None

LEAST = -9999.0
"""The lowest logprob that vLLM tells: JSON has no infinity."""


def prompt_major(outputs: Sequence[Output], prompts: int) -> list[Output]:
    """Outputs that came in rounds, a sample of each prompt a round, in order of their prompts."""
    return [output for prompt in range(prompts) for output in outputs[prompt::prompts]]


def complete(answer: Output, outputs: Sequence[Output], asked: Asked, ends: Collection[int]) -> Output:
    """Completes SGLang's answer to a completion in place. outputs: one a choice. ends: the model's end-of-sequence
    tokens."""
    for choice, output in zip(answer["choices"], outputs, strict=True):
        if asked.logprobs is not None:
            choice["logprobs"] = _texts(output, asked)
        choice["stop_reason"] = stop_reason(output, ends)
        choice["prompt_logprobs"] = prompt_logprobs(output, asked)
        choice.update(_weight_versions(output, asked))
    return answer


def chat(answer: Output, outputs: Sequence[Output], asked: Asked, ends: Collection[int]) -> Output:
    """Likewise for a chat, whose prompt is one."""
    for choice, output in zip(answer["choices"], outputs, strict=True):
        if asked.logprobs is not None:
            choice["logprobs"] = {"content": _content(output, asked, _entry)}
        choice["stop_reason"] = stop_reason(output, ends)
        choice.update(_weight_versions(output, asked))
    answer["prompt_logprobs"] = prompt_logprobs(outputs[0], asked)
    answer["prompt_token_ids"] = outputs[0].get("prompt_token_ids") if asked.return_token_ids else None
    return answer


def tokens(outputs: Sequence[Output], asked: Asked, ends: Collection[int]) -> Output:
    """The answer to `/inference/v1/generate`, but for the request's id, model, time and usage."""
    choices = [
        {
            "index": index,
            "finish_reason": output["meta_info"]["finish_reason"]["type"],
            "stop_reason": stop_reason(output, ends),
            "token_ids": output["output_ids"],
            "logprobs": None if asked.logprobs is None else {"content": _content(output, asked, _token)},
            **_weight_versions(output, asked),
        }
        for index, output in enumerate(outputs)
    ]
    return {
        "output_mode": "tokens",
        "prompt_logprobs": prompt_logprobs(outputs[0], asked),
        "prompt_token_ids": outputs[0].get("prompt_token_ids") if asked.return_token_ids else None,
        "choices": choices,
    }


def stop_reason(output: Output, ends: Collection[int]) -> int | str | None:
    """The token or text that ended a response; None: the end of the sequence did, or the response was cut off."""
    matched = output["meta_info"]["finish_reason"].get("matched")
    return None if matched in ends else matched


def prompt_logprobs(output: Output, asked: Asked) -> list[Output | None] | None:
    """Of each position of the prompt the token there and the likeliest ones, by id; None for the first, which nothing
    goes before. A token that is not among the likeliest has the next rank, whatever its own."""
    if (count := asked.prompt_logprobs) is None:
        return None
    return [
        None if position[0] is None else _ranked(position, _some(best, count))
        for position, best in zip(*_positions(output, "input"), strict=True)
    ]


def _ranked(position: Position, best: Sequence[Position]) -> Output:
    ranked = [
        (str(token), {"logprob": bounded(logprob), "rank": rank})
        for rank, (logprob, token, _) in enumerate([*best, position], start=1)
    ]
    return dict([ranked[-1], *ranked[:-1]])


def bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def _some(best: Best, count: int) -> Sequence[Position]:
    return (best or ())[:count]


def _positions(output: Output, of: str) -> tuple[Sequence[Position], Sequence[Best]]:
    """Of the `input` or the `output`: its tokens, and the likeliest ones where they were asked for."""
    meta_info = output["meta_info"]
    positions = meta_info.get(f"{of}_token_logprobs") or []
    return positions, meta_info.get(f"{of}_top_logprobs") or [None] * len(positions)


def _name(position: Position, asked: Asked) -> str:
    _, token, text = position
    return f"token_id:{token}" if asked.return_tokens_as_token_ids or text is None else text


def _texts(output: Output, asked: Asked) -> Output:
    """As completions have it: of the prompt, too, where the response echoes it."""
    parts = [_positions(output, of) for of in (("input", "output") if asked.echo else ("output",))]
    positions = [position for part, _ in parts for position in part]
    best = [each for _, part in parts for each in part]
    names = [_name(position, asked) for position in positions]
    offsets = [0]
    for name in names:
        offsets.append(offsets[-1] + len(name))
    top = [
        None
        if position[0] is None
        else {_name(each, asked): bounded(each[0]) for each in (*_some(likeliest, asked.logprobs or 0), position)}
        for position, likeliest in zip(positions, best, strict=True)
    ]
    logprobs = [bounded(logprob) for logprob, _, _ in positions]
    return {"text_offset": offsets[:-1], "token_logprobs": logprobs, "tokens": names, "top_logprobs": top}


def _content(output: Output, asked: Asked, entry: Callable[[Position, Asked], Output]) -> list[Output]:
    """As chats have it: an entry a position, with those of the likeliest tokens."""
    return [
        entry(position, asked) | {"top_logprobs": [entry(each, asked) for each in _some(best, asked.logprobs or 0)]}
        for position, best in zip(*_positions(output, "output"), strict=True)
    ]


def _entry(position: Position, asked: Asked) -> Output:
    logprob, _, text = position
    of_text = None if text is None or asked.return_tokens_as_token_ids else list(text.encode())
    return {"token": _name(position, asked), "logprob": bounded(logprob), "bytes": of_text}


def _token(position: Position, asked: Asked) -> Output:
    """Under the names of vLLM 0.33 and of those before."""
    logprob, token, _ = position
    return {"token": _name(position, asked), "token_id": token, "logprob": bounded(logprob)}


def _weight_versions(output: Output, asked: Asked) -> Output:
    if not asked.return_weight_versions:
        return {}
    return {"weight_versions": output["meta_info"].get("weight_versions", [])}
