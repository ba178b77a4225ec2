"""What a drafter's tensors hold before training.

The embedding is the target's and not stored, nor is the head, unless an EAGLE-3 drafter has a vocabulary of its own.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.drafter.config import DrafterConfig
from tlt_server.drafter.networks import Eagle, Eagle3
from tlt_server.errors import ConfigError

SPREAD = 0.02
"""Standard deviation of a matrix's entries, as of a target's before its training."""


def initial_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Ones for norms, zeros for biases, normal numbers for matrices; the same for the same seed. EAGLE's `fc` has the
    identity on the target's state added: the layer learns how the next state differs."""
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, config.dtype)
    sizes = {name: each for name, each in msgspec.to_builtins(config).items() if not name.startswith("rope_")}
    with torch.device("meta"):
        network = Eagle3(sizes) if config.kind is DrafterKind.EAGLE3 else Eagle(sizes)

    def fresh(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
        return torch.empty(shape).normal_(0, SPREAD, generator=generator).to(dtype)

    tensors = {name: fresh(name, weight.shape) for name, weight in network.named_parameters()}
    if config.kind is DrafterKind.EAGLE:
        tensors["fc.weight"][:, config.hidden_size :] += torch.eye(config.hidden_size)
    return tensors


def vocabulary_of(tokens: Tensor, target_vocab: int) -> dict[str, Tensor]:
    """EAGLE-3's maps between its vocabulary, `tokens` [V] int64 in ascending order, and the target's.

    d2t [V] int64: the target's token for each of the drafter's, less the drafter's own. t2d [target_vocab] bool:
    whether the drafter knows the target's token. SGLang reads the first; the second is for training.
    """
    known = torch.zeros(target_vocab, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` tokens [size] int64 that `counts` [target's vocabulary] is largest for, ascending; of equals the
    lowest."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def read_counts(path: Path, vocab: int) -> Tensor:
    """How often each token occurs: [vocab] int64, from JSON {"token id": count}, else 0. ConfigError: not that."""
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=dict[int, int])
    except OSError as error:
        raise ConfigError(f"token counts {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f'token counts {path}: {error}. Write {{"token id": count}}') from error
    if outside := [token for token in counts if not 0 <= token < vocab]:
        raise ConfigError(f"token counts {path}: token {outside[0]} is not one of the target's, 0 to {vocab - 1}")
    return torch.tensor([counts.get(token, 0) for token in range(vocab)])
