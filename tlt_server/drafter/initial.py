"""What a drafter's tensors hold before it has learnt anything."""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.drafter import layout
from tlt_server.drafter.config import DrafterConfig
from tlt_server.errors import ConfigError

SPREAD = 0.02
"""Standard deviation of a matrix's entries, as of a target's before its training."""


def initial_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Ones for norms, zeros for biases, normal numbers for matrices; the same for the same seed.

    To EAGLE's `fc` the identity on the target's state is added: what the layer then has to learn is how the next state
    differs from the last one.
    """
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, config.dtype)

    def fresh(name: str, shape: layout.Shape) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
        return torch.empty(shape).normal_(0, SPREAD, generator=generator).to(dtype)

    tensors = {name: fresh(name, shape) for name, shape in layout.weights(config).items()}
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
    """How often each token occurs: [vocab] int64, from a JSON object {"token id": count}; 0 where it names none.

    Raises:
        ConfigError: it cannot be read, or is not that.
    """
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=dict[int, int])
    except OSError as error:
        raise ConfigError(f"token counts {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f'token counts {path}: {error}. Write {{"token id": count}}') from error
    if outside := [token for token in counts if not 0 <= token < vocab]:
        raise ConfigError(f"token counts {path}: token {outside[0]} is not one of the target's, 0 to {vocab - 1}")
    return torch.tensor([counts.get(token, 0) for token in range(vocab)])
