"""Partial rollouts: what is asked of the server to continue one, and how its parts become one rollout."""

from typing import Any, TypeVar

import msgspec

from tlt_client.errors import InvalidArgument
from tlt_client.rollouts import DrafterSpan, FinishReason, Rollout, SpecCounts, TargetSpan
from tlt_client.sampling import SamplingParams

Span = TypeVar("Span", TargetSpan, DrafterSpan)

LOOKS_BACK = {
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0),
    "repetition_penalty": 1,
}
"""By these a server judges a token by those that it has sampled; SGLang's own takes what it is sent for a prompt. With
the value at which each does nothing."""


def left_of(begun: Rollout, sampling: SamplingParams) -> tuple[Rollout, SamplingParams]:
    """What to go on from, and how to sample the rest. What is not aborted is whole, as is what was cut at its limit.

    The rest has the seed that the rollout tells: so its tokens are those that it would have had.

    Raises InvalidArgument: it was begun with another limit or with none, or the law of the rest would be another one.
    """
    if not begun.aborted:
        return begun, sampling
    for name, neutral in LOOKS_BACK.items() if begun.seed is None else ():
        if getattr(sampling, name) not in (None, neutral):
            raise InvalidArgument(f"{name} looks back at sampled tokens, which a continued rollout sends as its prompt")
    had, limit = len(begun.tokens), sampling.max_new_tokens
    if limit is None or limit < had:
        raise InvalidArgument(f"max_new_tokens={limit} and {had} tokens: give the limit that the rollout began with")
    if limit == had:
        begun = msgspec.structs.replace(begun, finish_reason=FinishReason("length", length=limit))
    least = sampling.min_new_tokens and max(sampling.min_new_tokens - had, 0)
    seed = sampling.sampling_seed if begun.seed is None else begun.seed
    return begun, msgspec.structs.replace(
        sampling, max_new_tokens=limit - had, min_new_tokens=least, sampling_seed=seed
    )


def counting(begun: Rollout, sampling: SamplingParams, rest: SamplingParams) -> dict[str, Any]:
    """Fields of the request for the rest, by which the server counts what was sampled before. One that tells seeds
    does; it takes `min_new_tokens` for that of the whole response."""
    if begun.seed is None or not begun.tokens:
        return {}
    params = msgspec.to_builtins(rest)
    if sampling.min_new_tokens is not None:
        params["min_new_tokens"] = sampling.min_new_tokens
    return {"generated_tokens": len(begun.tokens), "sampling_params": params}


def joined(begun: Rollout, more: Rollout) -> Rollout:
    """One rollout of a partial one and what it was continued by, as if it had never been cut."""
    at, finish = len(begun.tokens), more.finish_reason
    if finish.type == "length":
        finish = FinishReason("length", length=at + len(more.tokens))
    return msgspec.structs.replace(
        more,
        tokens=begun.tokens + more.tokens,
        text=begun.text + more.text,
        logprobs=None if begun.logprobs is None or more.logprobs is None else begun.logprobs + more.logprobs,
        finish_reason=finish,
        prompt_tokens=begun.prompt_tokens or max(more.prompt_tokens - at, 0),
        completion_tokens=at + len(more.tokens),
        cached_tokens=begun.cached_tokens,
        seed=begun.seed if more.seed is None else more.seed,
        weight_versions=_target_spans(begun, more),
        drafter_versions=_spans(begun.drafter_versions, more.drafter_versions, at),
        accept_length=_accept_length(begun, more),
        spec=_counts(begun, more),
        ignored=tuple(dict.fromkeys(begun.ignored + more.ignored)),
        resamples=begun.resamples + more.resamples,
    )


def _target_spans(begun: Rollout, more: Rollout) -> tuple[TargetSpan, ...]:
    """Of all tokens or of none, as in any rollout."""
    if any(part.tokens and not part.weight_versions for part in (begun, more)):
        return ()
    return _spans(begun.weight_versions, more.weight_versions, len(begun.tokens))


def _spans(first: tuple[Span, ...], second: tuple[Span, ...], at: int) -> tuple[Span, ...]:
    """With the second's moved behind the first's; of one version that was cut in two, one span."""
    spans = list(first)
    for each in second:
        span = msgspec.structs.replace(each, start=each.start + at, end=each.end + at)
        if spans and spans[-1].end == span.start and _version(spans[-1]) == _version(span):
            spans[-1] = msgspec.structs.replace(spans[-1], end=span.end)
        else:
            spans.append(span)
    return tuple(spans)


def _version(span: TargetSpan | DrafterSpan) -> TargetSpan | DrafterSpan:
    return msgspec.structs.replace(span, start=0, end=0)


def _counts(begun: Rollout, more: Rollout) -> SpecCounts | None:
    """Of both parts; one without a token has none to add."""
    parts = [part.spec for part in (begun, more) if part.tokens or part.spec]
    known = [spec for spec in parts if spec is not None]
    if not known or len(known) < len(parts):
        return None
    return SpecCounts(
        sum(spec.verify_calls for spec in known),
        sum(spec.accepted_drafts for spec in known),
        sum(spec.proposed_drafts for spec in known),
    )


def _accept_length(begun: Rollout, more: Rollout) -> float | None:
    """Mean over the verify calls of both, whichever way the server counts."""
    counts = _counts(begun, more)
    if counts is None or not counts.verify_calls:
        return None
    parts = [(part.accept_length or 0.0, part.spec.verify_calls) for part in (begun, more) if part.spec]
    return sum(length * calls for length, calls in parts) / counts.verify_calls
