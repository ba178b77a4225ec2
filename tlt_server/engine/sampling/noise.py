"""Shared noise: the token after a prefix is a function of the prefix, the request's seed and the target alone.

At position t of a sequence (from 0, prompt included) token i has the noise g(seed, t, i), a standard Gumbel variate.
The token at t is the argmax of log p_t(i) + g(seed, t, i), which is distributed as p_t (Gumbel-max). Plain steps, the
nodes of chains and trees and a prefill's first token all take it so; hence a drafted token is accepted if it is the one
that the target takes at its parent, and no more is random. A drafter that adds the same noise to its own logits
proposes what the target is going to take (arXiv 2408.07978).

The noise is counter-based: Philox4x32-7 (Salmon et al., 2011: the fewest rounds that pass BigCrush) under the key
`seed`, at the counter (i // 2, t, 0, 0), gives two numbers of 64 bits, of which token i has one. So many, because a
token of probability p is taken where its number lies in about the first p of their range: at 64 bits one of probability
1e-17 has its own share; at 32, all those below 1e-10 in a vocabulary of 152 thousand would have that of one of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray

ROUNDS = 7
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF, _WORD = np.uint64(32), np.uint64(0xFFFFFFFF)

Words = NDArray[np.uint64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words], rounds: int = ROUNDS) -> list[Words]:
    """Philox4x32: four words from a counter of four and a key of two, each below 2**32; shapes broadcast."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (second >> _HALF) ^ c1 ^ key0, second & _WORD
        c2, c3 = (first >> _HALF) ^ c3 ^ key1, first & _WORD
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of every token at each row's position: two of [rows] int64 to [rows, vocab] float32, on a CPU."""
    key, at = (each.numpy().astype(np.uint64)[:, None] for each in (seeds, positions))
    pairs, zero = np.arange((vocab + 1) // 2, dtype=np.uint64), np.uint64(0)
    words = philox((pairs, at & _WORD, zero, zero), (key & _WORD, key >> _HALF))  # type: ignore[arg-type]
    high, low = (np.stack(two, -1).reshape(len(key), -1)[:, :vocab] for two in (words[::2], words[1::2]))
    return torch.from_numpy(gumbel_of(high, low))


def gumbel_of(high: Words, low: Words) -> NDArray[np.float32]:
    """-log(-log(1 - v)) of v = (bits + 1/2) / 2**64, in float32: as exact near 0 as near 1, and finite."""
    below, above = _fraction(high, low), _fraction(_WORD - high, _WORD - low)  # above: 1 - v
    upper = below >= 0.5
    return -np.log(-np.where(upper, np.log(above), np.log1p(-np.where(upper, np.float32(0.5), below))))


def _fraction(high: Words, low: Words) -> NDArray[np.float32]:
    small = (low.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return (high.astype(np.float32) + small) * np.float32(2.0**-32)


def add_noise(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    inverse_temperatures: torch.Tensor,
    noise_scales: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    rows_each: int,
) -> torch.Tensor:
    """Logits * inverse temperature + noise scale * noise: [bs * rows_each, n] float32, by which a drafter proposes.

    On a GPU nothing waits for a value: a CUDA graph may hold it. All but the rows of logits are contiguous. What is of
    each request may be longer than there are requests.

    logits:               [bs * rows_each, n] float32, bfloat16 or float16
    seeds:                [bs] int64
    positions:            [bs * rows_each] int64, of the token that is proposed
    inverse_temperatures: [bs] float32
    noise_scales:         [bs] float32; 0: no noise
    tokens:               [n] int64, the target's token of each column; None: the column itself
    """
    if logits.is_cuda:
        from tlt_server.engine.sampling import kernels

        return kernels.add_noise(
            logits, seeds, positions, inverse_temperatures, noise_scales, tokens, rows_each=rows_each
        )
    of = torch.arange(len(logits)) // rows_each
    vocab = logits.shape[1] if tokens is None else int(tokens.max()) + 1
    noise = gumbel(seeds[of], positions, vocab)
    noise = noise if tokens is None else noise[:, tokens]
    return (logits * inverse_temperatures[of, None]).add_(noise.mul_(noise_scales[of, None]))
