"""How to sample: SGLang's names, checked before anything is sent."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from tlt_client.errors import InvalidArgument

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is None is not sent, so that the server's default stands: often the model's own generation config.

    Raises InvalidArgument, which is a ValueError, on a wrong type, a value out of range or two grammars at once.
    How many samples to draw is not here: `generate_group` says it.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    """-1 is the whole vocabulary."""
    min_p: Probability | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    no_stop_trim: bool | None = None
    """Keep the stop string in the text."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: Mapping[Count, float] | None = None
    """What to add to the logit of a token id."""
    sampling_seed: int | None = None
    """64 bits. With the prompt and the weights it settles every token; `Rollout.seed` tells a drawn one. Where it is
    given for a group or a batch, sample i is sent `sample_seed(sampling_seed, i)`."""
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: Mapping[str, Any] | None = None
    """For a custom logit processor."""

    def __post_init__(self) -> None:
        for name, kind in _fields().items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise InvalidArgument(f"{name}={value!r}: {error}") from error
        if self.temperature == math.inf:
            raise InvalidArgument("temperature=inf: must be finite")
        if self.top_k is not None and self.top_k != -1 and self.top_k < 1:
            raise InvalidArgument(f"top_k={self.top_k}: must be -1 (the whole vocabulary) or at least 1")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise InvalidArgument(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise InvalidArgument(f"logit_bias[{token}]={bias}: must be finite; to forbid a token use -1e9")
        grammars = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, name)]
        if len(grammars) > 1:
            raise InvalidArgument(f"{' and '.join(grammars)} are both given: a request has one grammar")


@cache
def _fields() -> dict[str, Any]:
    return get_type_hints(SamplingParams, include_extras=True)


def sample_seed(seed: int, index: int) -> int:
    """The seed of one of several samples of a request to tlt-server: of sample k of n of prompt j, index j * n + k.

    That of index 0 is `seed` itself; others are the upper 53 bits of blake2b, of 8 bytes, over both as 8 bytes; all
    little endian. So samples of neighbouring seeds do not coincide.
    """
    if index == 0:
        return seed
    both = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little") >> 11
