"""The seed of each sample: its request's, or one drawn here, so that all ranks have the same; told in its meta_info.

Sample k, from 0, of prompt j of a request with one seed for n samples of each prompt has the seed
`sample_seed(seed, j * n + k)`. Where each prompt has sampling parameters of its own, those that give a seed count their
own samples, `sample_seed(seed, k)`; those without share the drawn seed, as before. Of a part of a batch, j is told by a
header.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from tlt_client.sampling import sample_seed
from tlt_client.wire import PLACES, SEED

from tlt_server.api.rollouts.scope import TOLD

FIRST_SAMPLE = "first_sample"
"""Of sampling parameters, on their way within this process: the index of their first sample, where it is known."""
_SEEDS = "tlt_seeds"
"""Of upstream's request for one prompt: the seeds of what is sent for it."""
DRAWN_BITS = 53
"""What a double holds, as which some read the numbers of JSON."""


class _Seeds:
    """Of what upstream sends for one prompt: the prompt alone, for the prefix cache, and then each of its samples.
    Upstream shares it among them all, and pickles it where it dumps requests."""

    def __init__(self, base: int, first: int) -> None:
        self._base, self._first, self._sent = base, first, 0

    def next(self) -> int:
        self._sent += 1
        return sample_seed(self._base, self._first + max(self._sent - 2, 0))


def give_seeds(obj: Any, raw: Any) -> None:
    """Puts a seed into all sampling parameters of a request.

    obj: upstream's `GenerateReqInput` or `EmbeddingReqInput`, normalised. raw: the HTTP request; None: it is the
    server's own. Raises ValueError, which upstream answers with status 400: the header is no seed.
    """
    of_prompts = [obj.sampling_params] if obj.is_single else obj.sampling_params[: obj.batch_size]
    samples, drawn, bases = getattr(obj, "parallel_sample_num", None) or 1, draw(raw), set()
    alike = all(params is of_prompts[0] for params in of_prompts)
    at = places(raw, len(of_prompts))
    for prompt, params in enumerate(of_prompts):
        own = params.get("sampling_seed")
        base = drawn if own is None else _in_64_bits(own)
        default = 0 if own is not None and not alike else at[prompt] * samples
        first = params.get(FIRST_SAMPLE, default)
        bases.add(base)
        seeded = {name: value for name, value in params.items() if name != FIRST_SAMPLE}
        seeded["sampling_seed"] = sample_seed(base, first)
        if obj.is_single:
            obj.sampling_params = seeded
            continue
        obj.sampling_params[prompt] = seeded
        if samples > 1:
            vars(obj[prompt])[_SEEDS] = _Seeds(base, first)
    if raw is not None and TOLD in raw.scope and len(bases) == 1:
        raw.scope[TOLD]["seed"] = bases.pop()


def draw(raw: Any) -> int:
    """A seed for a request that gives none: its header's, of one that may have been sent before, or a new one."""
    given = None if raw is None else raw.headers.get(SEED)
    if given is None:
        return secrets.randbits(DRAWN_BITS)
    if not (given.isascii() and given.isdecimal() and len(given) <= 16 and int(given) < 2**DRAWN_BITS):
        raise ValueError(f"{SEED}: {given[:32]!r} must be a decimal number below 2**{DRAWN_BITS}")
    return int(given)


def places(raw: Any, prompts: int) -> Sequence[int]:
    """Of each prompt, in the batch that a request is a part of; of a whole one they are counted. ValueError: the header
    does not hold them."""
    given = None if raw is None else raw.headers.get(PLACES)
    if given is None:
        return range(prompts)
    each = given.split(",")
    if len(each) != prompts or not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in each):
        raise ValueError(f"{PLACES}: {given[:32]!r} must be {prompts} decimal numbers, one for each prompt")
    return [int(part) for part in each]


def seed_sample(state: Any, req: Any) -> None:
    """One of several samples of a prompt, which upstream makes alike, takes its own seed. state: its `ReqState`."""
    if (seeds := vars(state.obj).get(_SEEDS)) is not None:
        seed = seeds.next()
        state.obj.sampling_params = state.obj.sampling_params | {"sampling_seed": seed}
        req.sampling_params = msgspec.structs.replace(req.sampling_params, sampling_seed=seed)


def seed_of(state: Any) -> int:
    """Of a sample, by upstream's `ReqState`."""
    seed: int = state.obj.sampling_params["sampling_seed"]
    return seed


def _in_64_bits(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
