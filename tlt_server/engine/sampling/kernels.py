"""The noise on a GPU, where it is used: inside the argmax over a vocabulary, and on a drafter's logits.

The bits are those of `noise.gumbel`; its logarithms round otherwise, by an ulp or a few. Noise is made in registers and
never stored: its arithmetic, some 80 instructions a token, takes longer than reading the scores.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives kernels' arguments their types, call by call.

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

BLOCK, WARPS = 2048, 4
"""Tokens and warps of a program: 16 tokens a thread, read 16 bytes at a time, hide each other's latencies and stay in
48 registers. One row of 152 thousand makes 75 programs; smaller ones would spend more of their time on reducing."""


@triton.jit
def _log(x):
    """Of normal positive numbers, to about an ulp. `tl.log` minds all others, by a quarter more instructions."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    r = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0  # x = (1 + r) * 2**exponent, 2/3 <= 1 + r < 4/3
    # (log(1 + r) - r) / r**2, fitted so that the largest relative error of log(1 + r) is least: 3e-8.
    q = 0.140263572 * r - 0.153885394
    q = q * r + 0.139958069
    q = q * r - 0.164159611
    q = q * r + 0.200111687
    q = q * r - 0.250078201
    q = q * r + 0.333331972
    q = q * r - 0.499999374
    return exponent.to(tl.float32) * 0.693147181 + (r * r * q + r)


@triton.jit
def _gumbel(high, low):
    """-log(-log(1 - v)) of v = (bits + 1/2) / 2**64, as `noise.gumbel_of` has it; the bits are two uint32."""
    upper = high >= 0x80000000  # there 1 - v is what is small
    high, low = tl.where(upper, ~high, high), tl.where(upper, ~low, low)
    small = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-32
    rest = 1.0 - small
    lost = tl.where(upper, 0.0, (1.0 - rest) - small)  # by rounding: it is all of log1p(-small) that `rest` = 1 leaves
    return -_log(-(_log(tl.where(upper, small, rest)) + lost))


@triton.jit
def _neighbours(seed, position, pairs):
    """The noise of tokens 2 * pairs and 2 * pairs + 1, in order: one Philox call for both."""
    high0, low0, high1, low1 = tl.philox(seed, pairs, position.to(tl.uint32), 0, 0, n_rounds=7)
    return _gumbel(tl.interleave(high0, high1), tl.interleave(low0, low1))


@triton.jit
def _chosen(seed, position, tokens):
    """The noise of any tokens, uint32: one Philox call for each."""
    high0, low0, high1, low1 = tl.philox(seed, tokens // 2, position.to(tl.uint32), 0, 0, n_rounds=7)
    even = tokens % 2 == 0
    return _gumbel(tl.where(even, high0, high1), tl.where(even, low0, low1))


@triton.jit(do_not_specialize=["nodes"])  # else a batch's first tree would wait for a compiler
def _best_of_block(
    scores, seeds, positions, temperatures, best, tokens, nodes, vocab, stride, blocks, BLOCK: tl.constexpr
):
    """Of a row's block of tokens: the best score with noise, and whose it is."""
    row, block = tl.program_id(0), tl.program_id(1)
    request = row // nodes
    column = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row.to(tl.int64) * stride + column, mask=column < vocab, other=-float("inf"))
    score = score.to(tl.float32)
    if temperatures is not None:
        score = tl.div_rn(score, tl.load(temperatures + request))  # rounds as torch's division
    pairs = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    noisy = score + _neighbours(tl.load(seeds + request), tl.load(positions + row), pairs)
    noisy = tl.where(noisy > -float("inf"), noisy, -float("inf"))  # NaN never wins
    highest, at = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * blocks + block, highest)
    tl.store(tokens + row * blocks + block, (block * BLOCK + at).to(tl.int64))


def noisy_argmax(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    nodes: int,
    temperatures: torch.Tensor | None = None,
) -> torch.Tensor:
    """argmax of scores / temperature + noise; of equals the lowest, of nothing but -inf and NaN 0: [rows] int64.

    scores:       [bs * nodes, vocab] float32, bfloat16 or float16, divided in float32; rows contiguous
    seeds:        [bs] int64, any
    positions:    [bs * nodes] int64, of the token that is chosen
    temperatures: [bs] or [bs, 1] float32; None: the scores are divided already
    """
    rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=scores.device)
    _best_of_block[(rows, blocks)](
        scores,
        seeds.contiguous(),
        positions.contiguous(),
        None if temperatures is None else temperatures.contiguous(),
        best,
        tokens,
        nodes,
        vocab,
        scores.stride(0),
        blocks,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return tokens.gather(1, best.argmax(-1, keepdim=True)).squeeze(1)


@triton.jit(do_not_specialize=["rows_each"])
def _add_to_block(
    logits,
    noisy,
    seeds,
    positions,
    inverse_temperatures,
    noise_scales,
    tokens,
    rows_each,
    n,
    stride,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    request = row // rows_each
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    seed, position = tl.load(seeds + request), tl.load(positions + row)
    if tokens is None:
        noise = _neighbours(seed, position, block * (BLOCK // 2) + tl.arange(0, BLOCK // 2))
    else:
        noise = _chosen(seed, position, tl.load(tokens + column, mask=inside, other=0).to(tl.uint32))
    score = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside).to(tl.float32)
    scaled = score * tl.load(inverse_temperatures + request)
    tl.store(noisy + row.to(tl.int64) * n + column, scaled + tl.load(noise_scales + request) * noise, mask=inside)


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
    """`noise.add_noise` by one kernel, which a CUDA graph may hold: it reads all arguments on the GPU."""
    rows, n = logits.shape
    noisy = torch.empty(rows, n, dtype=torch.float32, device=logits.device)
    _add_to_block[(rows, triton.cdiv(n, BLOCK))](
        logits,
        noisy,
        seeds,
        positions,
        inverse_temperatures,
        noise_scales,
        tokens,
        rows_each,
        n,
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return noisy
