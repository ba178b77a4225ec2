"""The embedded target and its drafters, read by the trainer, and runs of rollouts of that target."""

import json
from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems, sample_texts
from tlt_server.demo.training.corpus import Sequence
from tlt_server.demo.training.model import Target
from tlt_server.demo.training.sampling import sample, with_states
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.network import Network, network
from tlt_server.trainer.learn.packing import Run
from tlt_server.trainer.publish.folder import load_drafter

TARGET_FOLDER, EAGLE_FOLDER = default_paths()
FOLDERS = {"eagle": EAGLE_FOLDER, "eagle3": eagle3_path()}


def config(kind: str) -> dict[str, object]:
    read: dict[str, object] = json.loads((FOLDERS[kind] / "config.json").read_text())
    return read


def embedded(kind: str) -> Network:
    """A drafter as it is embedded, in float32."""
    return load_drafter(FOLDERS[kind]).network


def from_nothing(kind: str, seed: int = 0) -> Network:
    """The same drafter, untrained."""
    torch.manual_seed(seed)
    drafter = network(config(kind))
    for weight in drafter.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    return drafter


@cache
def target() -> Target:
    loaded = load_target(TARGET_FOLDER)
    loaded.requires_grad_(False)
    return loaded


@cache
def frozen() -> Frozen:
    return Frozen(target().model.embed_tokens.weight, target().lm_head.weight)


def run_of(tokens: Tensor, prompt: int, kind: str) -> Run:
    """A whole sequence [T] with the target's states of it."""
    (run,) = with_states(target(), (0, 1, 2) if kind == "eagle3" else (), [Sequence(tokens.numpy(), prompt)])
    return run


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))


@cache
def texts(kind: str, count: int) -> list[Run]:
    """Runs of the task's own worked solutions."""
    encoded = tokenizer().encode_batch(sample_texts(count, seed=5))
    return [run_of(torch.tensor(each.ids), prompt=8, kind=kind) for each in encoded]


@cache
def sampled() -> list[Sequence]:
    """What the target says at temperature 1, on problems that nobody trained on; cut at 128 tokens."""
    prompts = [each.ids for each in tokenizer().encode_batch([problem.prompt for problem in problems(16, seed=5)])]
    return sample(target(), prompts, seed=5, max_length=128)


@cache
def rollouts(kind: str) -> list[Run]:
    return [run_of(torch.from_numpy(each.tokens).long(), each.prompt_length, kind) for each in sampled()]


def one_chain(drafter: Network, shared: Frozen, run: Run, start: int, steps: int) -> list[Tensor]:
    """What the head reads in each step of the chain from `start`, with all keys so far in a cache."""
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.append((key, value))
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
        mask = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - query.shape[1])
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return mixed[0]

    state, reads, first = drafter.mix(run.states[: start + 1]), [], 0
    for last in range(start, start + steps):
        at = torch.arange(first, last + 1)
        read, state = drafter.step(shared.embedding[run.tokens[at + 1]], state, drafter.rope(at), attend)
        reads.append(read[-1])
        state, first = state[-1:], last + 1
    return reads
