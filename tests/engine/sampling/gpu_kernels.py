"""The kernels against the reference: on a GPU, with times; or small, by Triton's interpreter, without one.

python -m tests.engine.sampling.gpu_kernels
TRITON_INTERPRET=1 python -m tests.engine.sampling.gpu_kernels --small
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.lib.draws import SEEDS, long_tail, p_of_law
from tlt_server.engine.sampling import noise

VOCAB = 152_064
KINDS = ("normal", "flat", "peaked", "masked", "not a number", "huge", "infinite", "nothing")
TOLERANCE = 1e-4
"""Kernel and reference round logarithms differently: tokens whose scores differ by less may change places."""


@dataclass(frozen=True)
class Case:
    """One call of the noisy argmax, on a CPU."""

    kind: str
    vocab: int
    bs: int = 2
    nodes: int = 1
    dtype: torch.dtype = torch.float32
    tempered: bool = False
    padded: int = 0
    """Columns beyond the vocabulary, between rows."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Scores, seeds, positions, temperatures."""
        random = torch.Generator().manual_seed(self.vocab + self.bs + self.nodes)
        rows = self.bs * self.nodes
        scores = scores_of(self.kind, rows, self.vocab + self.padded, random).to(self.dtype)[:, : self.vocab]
        seeds = torch.randint(-(2**63), 2**63 - 1, (self.bs,), generator=random)
        seeds[: len(SEEDS)] = torch.tensor(SEEDS[: self.bs])
        positions = torch.randint(0, 200_000, (rows,), generator=random)
        temperatures = torch.rand(self.bs, 1, generator=random) * 1.5 + 0.1
        return scores, seeds, positions, temperatures if self.tempered else None


def scores_of(kind: str, rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Scores of a kind, [rows, vocab] float32."""
    drawn = torch.randn(rows, vocab, generator=random)
    some = torch.rand(rows, vocab, generator=random) < 0.3
    return {
        "normal": drawn * 3,
        "flat": drawn * 0,
        "peaked": drawn * 30,
        "masked": drawn.masked_fill(some.logical_not(), float("-inf")),
        "not a number": drawn.masked_fill(some, float("nan")),
        "huge": torch.where(some, 1e12, -1e12),
        "infinite": drawn.masked_fill(some, float("inf")),
        "nothing": torch.full_like(drawn, float("-inf")),
    }[kind]


def wrong_rows(case: Case, tokens: torch.Tensor) -> tuple[int, int]:
    """Rows whose token is not the best by more than the tolerance, and rows whose token is another than the best."""
    scores, seeds, positions, temperatures = case.inputs()
    scores = scores.float()
    if temperatures is not None:
        scores = scores / temperatures.repeat_interleave(case.nodes, dim=0)
    noisy = scores + noise.gumbel(seeds.repeat_interleave(case.nodes), positions, case.vocab)
    noisy = noisy.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    best, first = noisy.max(-1)
    if tokens.shape != first.shape or tokens.dtype != torch.int64 or not ((tokens >= 0) & (tokens < case.vocab)).all():
        return len(first), len(first)
    found = noisy.gather(1, tokens[:, None])[:, 0]
    differ = tokens != first
    # Where all noise is lost in the score, the best are equal, and the first of them is the answer.
    apart = (best - found > TOLERANCE) | ((best.abs() > 1e9) & differ)
    return int(apart.sum()), int(differ.sum())


def cases(small: bool) -> Iterator[Case]:
    """Sizes around blocks and pairs, all kinds, dtypes with and without temperatures, several nodes."""
    vocabs = (1, 2047, 2051) if small else (1, 2, 3, 31, 2047, 2048, 2049, 4097, 32_001, 150_001, VOCAB)
    yield from (Case(kind, vocab, bs=2 if small and kind != "normal" else 7) for kind, vocab in product(KINDS, vocabs))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, tempered, nodes in product(dtypes, (False, True), (3,) if small else (1, 3, 16, 32)):
        yield Case("normal", 2500 if small else VOCAB, 2, nodes, dtype, tempered, padded=8)
    yield Case("masked", 2301, 3, 2, tempered=True, padded=3)
    yield Case("normal", 150_001, 1 if small else 300)


def check_variates(device: str) -> int:
    """Of bits at both ends, where rare tokens are decided, and in the middle; returns how many checks failed."""
    from tests.engine.sampling.variates import variates

    random, failed = np.random.default_rng(0), 0
    most, anywhere = np.uint64(2**32 - 1), random.integers(0, 2**32, 4096, dtype=np.uint64)
    sizes = (2.0 ** (32 * random.random(4096))).astype(np.uint64) - np.uint64(1)  # as many small as large
    nearby = np.uint64(2**31 - 2048) + np.arange(4096, dtype=np.uint64)
    zero = np.zeros_like(sizes)
    ends = {"first": (zero, sizes), "low": (sizes, anywhere), "any": (anywhere, sizes), "middle": (nearby, anywhere)}
    ends |= {"high": (most - sizes, anywhere), "last": (most - zero, most - sizes)}
    for name, bits in ends.items():
        wanted = noise.gumbel_of(*bits)
        error = float((abs(variates(*bits, device) - wanted) / np.maximum(abs(wanted), 1.0)).max())
        failed += not error <= 1e-6
        say(f"{'right' if error <= 1e-6 else 'WRONG'}  variates off by {error:.1e}, {name}")
    return failed


def check_argmax(device: str, small: bool) -> int:
    """Prints a line a case; returns how many failed."""
    from tlt_server.engine.sampling.kernels import noisy_argmax

    failed = 0
    for case in cases(small):
        scores, seeds, positions, temperatures = case.inputs()
        there = scores.to(device) if scores.is_contiguous() else strided(scores, device)
        heat = None if temperatures is None else temperatures.to(device)
        tokens = noisy_argmax(there, seeds.to(device), positions.to(device), case.nodes, heat).cpu()
        wrong, differ = wrong_rows(case, tokens)
        failed += bool(wrong)
        say(f"{'WRONG' if wrong else 'right'}  {wrong} wrong, {differ} other of {len(tokens)} rows  {case}")
    return failed


def strided(scores: torch.Tensor, device: str) -> torch.Tensor:
    """The same view of wider rows there, which are else made contiguous on the way."""
    wide = torch.zeros(len(scores), scores.stride(0), dtype=scores.dtype, device=device)
    wide[:, : scores.shape[1]] = scores.to(device)
    return wide[:, : scores.shape[1]]


def noise_arguments(device: str, n: int, mapped: bool, bs: int = 3, rows_each: int = 2) -> list[torch.Tensor | None]:
    """What `add_noise` is given, in order, the last request without noise."""
    random = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, VOCAB if n > 5000 else 3 * n, (n,), generator=random) if mapped else None
    given = (
        torch.randn(bs * rows_each, n, generator=random),
        torch.tensor((SEEDS * bs)[:bs]),
        torch.randint(0, 100_000, (bs * rows_each,), generator=random),
        torch.rand(bs, generator=random) + 0.5,
        torch.tensor([1.0, 0.7, 0.0] * bs)[:bs],
        tokens,
    )
    return [None if each is None else each.to(device) for each in given]


def error_of(found: torch.Tensor, given: list[torch.Tensor | None], rows_each: int) -> float:
    """The largest difference from the reference, and infinite where a row without noise is not just scaled."""
    logits, *rest = (None if each is None else each.cpu() for each in given)
    plain = logits * rest[2].repeat_interleave(rows_each)[:, None]
    wanted = noise.add_noise(logits, *rest, rows_each=rows_each)
    silent = (rest[3] == 0).repeat_interleave(rows_each)
    if not torch.equal(found.cpu()[silent], plain[silent]):
        return float("inf")
    return float((found.cpu() - wanted).abs().max())


def check_add_noise(device: str, small: bool) -> int:
    """Prints a line a case; returns how many failed."""
    from tlt_server.engine.sampling.kernels import add_noise

    failed = 0
    sizes = (1, 2051) if small else (1, 2, 3, 2047, 2049, 32_000, 150_001, VOCAB)
    dtypes = (torch.float32, torch.bfloat16)
    for n, mapped, rows_each, dtype in product(sizes, (False, True), (2,) if small else (1, 4), dtypes):
        given = noise_arguments(device, n, mapped, rows_each=rows_each)
        given[0] = given[0].to(dtype)
        error = error_of(add_noise(*given, rows_each=rows_each), given, rows_each)
        failed += not error <= 1e-5
        right = "right" if error <= 1e-5 else "WRONG"
        say(f"{right}  add_noise off by {error:.1e}  {n=} {mapped=} {rows_each=} {dtype}")
    return failed


def check_graph(device: str) -> int:
    """A captured `add_noise` reads what its buffers hold when it is replayed; returns how many failed."""
    failed = 0
    for mapped in (False, True):
        buffers, later = (noise_arguments(device, n, mapped) for n in (32_000, 32_000))
        for each in later[:3]:
            each.copy_(each.flip(0))
        noise.add_noise(*buffers, rows_each=2)  # compiled before it is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            noisy = noise.add_noise(*buffers, rows_each=2)
        for buffer, value in zip(buffers, later, strict=True):
            if buffer is not None:
                buffer.copy_(value)
        graph.replay()
        error = error_of(noisy, later, 2)
        failed += not error <= 1e-5
        say(f"{'right' if error <= 1e-5 else 'WRONG'}  add_noise in a CUDA graph off by {error:.1e}  {mapped=}")
    return failed


def check_law(device: str, vocab: int, draws: int, rows: int) -> int:
    """Prints the p-value of draws of a long-tailed law; returns whether it is too small."""
    from tlt_server.engine.sampling.kernels import noisy_argmax

    p = p_of_law(lambda *given: noisy_argmax(*given, nodes=1), long_tail(vocab), draws, device, rows)
    say(f"{'right' if p > 0.001 else 'WRONG'}  p = {p:.3f} for {draws} draws of {vocab} tokens")
    return int(p <= 0.001)


def time_argmax(device: str, rows: int) -> None:
    """Prints median times of the noisy argmax, and of what torch would do instead."""
    from tlt_server.engine.sampling.kernels import noisy_argmax

    scores = torch.randn(rows, VOCAB, device=device)
    half, heat = scores.bfloat16(), torch.full((rows, 1), 0.9, device=device)
    seeds, positions = torch.arange(rows, device=device), torch.arange(rows, device=device)
    say_times(
        f"argmax, {rows} rows",
        noisy=lambda: noisy_argmax(scores, seeds, positions, 1),
        noisy_bf16_tempered=lambda: noisy_argmax(half, seeds, positions, 1, heat),
        torch_multinomial=lambda: torch.multinomial(scores.softmax(-1), 1),
        torch_race=lambda: scores.softmax(-1).div_(torch.empty_like(scores).exponential_()).argmax(-1),
        torch_argmax=lambda: scores.argmax(-1),
    )


def time_add_noise(device: str, rows: int, n: int) -> None:
    """Likewise of noise on logits; torch's needs no seeds."""
    from tlt_server.engine.sampling.kernels import add_noise

    every, some = (noise_arguments(device, n, mapped, bs=rows, rows_each=1) for mapped in (False, True))
    half = [every[0].bfloat16(), *every[1:]]
    say_times(
        f"add_noise, {rows} rows of {n}",
        every=lambda: add_noise(*every, rows_each=1),
        bf16=lambda: add_noise(*half, rows_each=1),
        mapped=lambda: add_noise(*some, rows_each=1),
        torch=lambda: (every[0] * 0.9).sub_(torch.empty_like(every[0]).exponential_().log_()),
    )


def say_times(what: str, **calls: Callable[[], object]) -> None:
    """Prints medians in microseconds, of calls that find their inputs in no cache."""
    from triton.testing import do_bench

    times = (f"{name} {1000 * do_bench(call, return_mode='median'):.1f}" for name, call in calls.items())
    say(f"{what}, us: {', '.join(times)}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for the interpreter, no times")
    small = parser.parse_args().small
    device = "cpu" if small else "cuda"
    say("interpreted" if small else torch.cuda.get_device_name())
    failed = check_variates(device) + check_argmax(device, small) + check_add_noise(device, small)
    failed += check_law(device, *((50, 64, 32) if small else (150_001, 1_000_000, 512)))
    if not small:
        failed += check_graph(device)
        for rows in (1, 4, 32, 128, 512, 1024):
            time_argmax(device, rows)
        for rows, n in product((1, 32, 128), (32_000, VOCAB)):
            time_add_noise(device, rows, n)
    say(f"{failed} checks failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
