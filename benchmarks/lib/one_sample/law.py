"""Whether tokens that the noise takes have the law that they should, and are independent: chi-squared tests."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tlt_client import sample_seed

from benchmarks.lib.draws import Take, long_tail, p_of_law, p_of_pairs
from tlt_server.engine.sampling.noise import gumbel
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

VOCAB = 150_001
NEIGHBOURS = {"positions": (0, 1), "far": (0, 1000), "requests": (1, 0), "both": (1, 1)}
"""How far two draws are apart, in seeds and positions."""


def by_reference(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """On a CPU; a row of 150 thousand tokens takes a core 10 ms."""
    return gumbel(seeds, positions, scores.shape[1]).add_(scores).argmax(-1)


def by_kernel(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """On a GPU, wherever the arguments are."""
    from tlt_server.engine.sampling.kernels import noisy_argmax

    return noisy_argmax(scores.cuda(), seeds.cuda(), positions.cuda(), 1).cpu()


def on_two_cores(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`by_reference`, half of the rows each: numpy lets other threads run."""
    halves = (each.chunk(2) for each in (scores, seeds, positions))
    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(by_reference, *halves)))


def of_samples(take: Take) -> Take:
    """Seeds of samples of one request in place of neighbours: 2 s and 2 s + 1 become samples 1 and 2 of seed s."""

    def taken(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found, places = seeds.unique(return_inverse=True)
        drawn = torch.tensor([sample_seed(seed // 2, 1 + seed % 2) for seed in found.tolist()])
        return take(scores, drawn[places], positions)

    return taken


def measured(draws: int, pairs: int, vocab: int = VOCAB) -> Figures:
    """draws: of a law of so many tokens. pairs: of each test of independence, over 8 tokens."""
    take, device, rows = (by_kernel, "cuda", 512) if has_gpu() else (on_two_cores, "cpu", 8)
    parts = {name: p_of_pairs(take, pairs, *apart) for name, apart in NEIGHBOURS.items()}
    parts["samples"] = p_of_pairs(of_samples(take), pairs, 1, 0)
    return {
        "law_tokens": vocab,
        "law_draws": draws,
        "chi_squared_p": p_of_law(take, long_tail(vocab), draws, device, rows),
        "independence_pairs": pairs,
        **{f"independence_p_{name}": p for name, p in parts.items()},
        "independence_p": 1 - (1 - min(parts.values())) ** len(parts),
    }
