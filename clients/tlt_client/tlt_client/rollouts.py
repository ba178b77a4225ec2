"""What a rollout request gives back. Immutable; `msgspec.json.encode` and `decode` take them there and back."""

import msgspec


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why sampling ended."""

    type: str
    """`stop`: end of sequence or a stop condition; `length`: max_new_tokens; `abort`: somebody ended it early."""
    matched: int | str | list[int] | None = None
    """For `stop`: the token id, string or regular expression that ended it."""
    length: int | None = None
    """For `length`: the limit that was reached, in tokens."""
    message: str | None = None
    """For `abort`: what the server says of it."""


class SpecCounts(msgspec.Struct, frozen=True):
    """What speculative decoding did for one rollout."""

    verify_calls: int
    """Passes of the target that verified a draft."""
    accepted_drafts: int
    """Drafted tokens that the target accepted; bonus tokens are not among them."""
    proposed_drafts: int
    """Drafted tokens that the target was asked about."""


class TargetSpan(msgspec.Struct, frozen=True):
    """Tokens of a rollout, [start, end), that one version of the target sampled."""

    start: int
    end: int
    version: str
    """The trainer's own name for it, as in `weight_version`."""
    target_version: int | None = None
    """The server's count of publications; None from an SGLang server."""
    partial: bool = False
    """Sampled while that version was being written: neither quite it nor the one before."""


class DrafterSpan(msgspec.Struct, frozen=True):
    """Tokens of a rollout, [start, end), that were drafted by one version of the drafter."""

    start: int
    end: int
    version: int


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response.

    One that was aborted on the way is a rollout too: its tokens are what was sampled until then, possibly none, and a
    trainer of partial rollouts goes on from them. Ask `aborted` before taking it for a whole one.
    """

    rid: str
    """The request id that was answered; `resamples` is marked in it."""
    tokens: tuple[int, ...]
    """Sampled token ids, the stop token included; shape [completion_tokens]."""
    text: str
    """The tokens as text, without stop token or stop string; empty where the server has no tokenizer."""
    logprobs: tuple[float, ...] | None
    """Natural log of each token's probability under the law that it was sampled from; None unless asked for."""
    finish_reason: FinishReason
    prompt_tokens: int
    """0 where it was aborted while it waited, from a server that does not say then, as SGLang's own."""
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV entries were found in the cache."""
    seed: int | None = None
    """What it was sampled by: as `sampling_seed`, with the same prompt and weights, it gives the same tokens. None from
    a server that does not say, as SGLang's own."""
    weight_version: str | None = None
    """Version of the target's weights when the rollout ended."""
    weight_versions: tuple[TargetSpan, ...] = ()
    """Which target sampled which tokens, in order, all of them; empty from a server that does not say."""
    drafter_versions: tuple[DrafterSpan, ...] = ()
    """Which drafter drafted which tokens; empty without speculation."""
    accept_length: float | None = None
    """Tokens per target pass, bonus token counted, as the server says: from tlt-server 1 + accepted_drafts /
    verify_calls, from SGLang completion_tokens / verify_calls. None without speculation."""
    spec: SpecCounts | None = None
    """None without speculation, or from a server that does not send all three counts."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that the server does not honour, as tlt-server names them."""
    resamples: int = 0
    """How often it was sampled anew because an answer was lost. See `Retry`: many of these bias lengths."""

    @property
    def aborted(self) -> bool:
        return self.finish_reason.type == "abort"


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a streamed rollout: what is new since the piece before it."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None
    rollout: Rollout | None = None
    """The whole, on the last piece only."""
