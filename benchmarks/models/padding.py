"""A small model inside a large one that computes the same: where each weight goes, and what is put around it.

Notation: h and H are the hidden sizes of the small and the large model.

**Hidden state.** The first h dimensions are the small model's. The others hold the same small positive numbers, the
`spare`, at every token and after every layer: the embedding puts them there, and no layer writes to them. RMSNorm then
divides by sqrt((|x|^2 + |spare|^2) / H + eps'), which is sqrt(h / H) times what the small model divides by if
eps' = (h eps - |spare|^2) / H; its weights carry that factor.

**Layers.** What reads the hidden state (query, key, value, gate, up) is random but for the small model's rows, which
read the first h dimensions alone. What writes to it (output, down) is zero but for the small model's block, so that the
random heads and units cost their time and change nothing. A layer that is added is a copy whose writers are all zero.

**Heads.** A group of query heads keeps its key head. A wider head has more rotary frequencies, the small one's among
them; the dimensions in between are zero in the query.

**Vocabulary.** The head's rows of tokens that are added point against the spare: no softmax gives them any weight.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.demo.training.model import Shape

SPREAD = 0.02
"""Standard deviation of random weights, as of an untrained model: a GPU multiplies zeros faster than it should."""
ADDED_LOGIT = -80.0
"""Of an added token in an EAGLE drafter, whose state is not normalised; lower in what has a norm before its head."""
SPARE_NORM = 256.0
"""RMSNorm scales the spare by this over the small model's root mean square, which stays below it: 110 at most, found
over worked solutions, before the last norm. So the spare is larger after any norm than before it."""
WRITERS = ("o_proj", "down_proj")


def rotary_dims(small: int, large: int) -> Tensor:
    """Dimensions [small] of a head of `large` whose rotary frequencies are those of a head of `small`, in order.

    Pair i of n turns by theta^(-i/n) a token (Su et al., arXiv 2104.09864), rotating dimensions i and i + n.
    """
    pairs = torch.arange(small // 2) * (large // small)
    return torch.cat((pairs, pairs + large // 2))


def query_heads(small: Shape, large: Shape) -> Tensor:
    """The large model's query heads [small.heads] that take the small one's: the first of their key head's group."""
    heads, of_group = torch.arange(small.heads), small.heads // small.kv_heads
    return heads // of_group * (large.heads // large.kv_heads) + heads % of_group


def real_layers(small: int, large: int) -> list[int]:
    """Indices, of `large` layers, of those that take the small model's: evenly spread, the first layer among them."""
    return [-(-layer * large // small) for layer in range(small)]


class Padding:
    """Puts the weights of a small model, or of its drafter, into those of a large one.

    Args:
        small: of the weights given.
        large: of the weights made; its eps is ignored and determined here. Every size at least as large, hidden larger,
            head_dim a multiple, and not fewer query heads to a key head.
        dtype: of the weights made.
        device: where they are made, one after another. On "meta" they have sizes and no content.
        seed: of what is random; the same numbers on the same kind of device.
    """

    def __init__(self, small: Shape, large: Shape, dtype: torch.dtype, device: str, seed: int) -> None:
        spare = 0.5 + torch.rand(large.hidden - small.hidden, generator=torch.Generator().manual_seed(seed))
        spare = (spare * (small.hidden * small.eps / 2 / spare.square().sum()).sqrt()).to(dtype)
        energy = spare.double().square().sum().item()
        self.small, self.large = small, replace(large, eps=(small.hidden * small.eps - energy) / large.hidden)
        self._empty = torch.empty(0, dtype=dtype, device=device)
        self._random = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        self._spare = spare.to(device)

    def target(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The large target's weights, from all of the small one's, by their names in a Hugging Face checkpoint."""
        yield from self.drafter({name: each for name, each in weights.items() if ".layers." not in name})
        real = real_layers(self.small.layers, self.large.layers)
        for layer in range(self.large.layers):
            source = f"model.layers.{layer * self.small.layers // self.large.layers}."
            for name, weight in weights.items():
                if name.startswith(source):
                    muted = layer not in real and name.split(".")[-2] in WRITERS
                    placed = self._placed(name, torch.zeros_like(weight) if muted else weight)
                    yield name.replace(source, f"model.layers.{layer}."), placed

    def drafter(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights of the large target's drafter, EAGLE or EAGLE-3, from those of the small one's."""
        for name, weight in weights.items():
            yield name, self._placed(name, weight)

    def _placed(self, name: str, weight: Tensor) -> Tensor:
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            return self._attention(part, weight)
        if part in ("gate_proj", "up_proj"):
            return self._reader(weight, torch.arange(self.small.mlp), self.large.mlp)
        if part == "down_proj":
            return self._writer(weight, torch.arange(self.small.mlp), self.large.mlp)
        if name.endswith("norm.weight"):
            return self._norm(weight)
        others = {
            "model.embed_tokens.weight": self._embedding,
            "lm_head.weight": self._head,
            "fc.weight": self._mixer,
            "fc.bias": self._bias,
        }
        return others[name](weight)

    def _attention(self, part: str, weight: Tensor) -> Tensor:
        small, large = self.small, self.large
        queries, keys = query_heads(small, large), torch.arange(small.kv_heads)
        if part == "o_proj":
            return self._writer(self._widened(weight.T).T, self._of_heads(queries), large.heads * large.head_dim)
        if part == "q_proj":
            weight = weight * (large.head_dim / small.head_dim) ** 0.5  # attention divides by the root of head_dim
            return self._reader(self._widened(weight), self._of_heads(queries), large.heads * large.head_dim)
        return self._reader(self._widened(weight), self._of_heads(keys), large.kv_heads * large.head_dim)

    def _random_matrix(self, rows: int, columns: int) -> Tensor:
        return self._empty.new_empty(rows, columns).normal_(0, SPREAD, generator=self._random)

    def _embedding(self, weight: Tensor) -> Tensor:
        placed = self._random_matrix(self.large.vocab, self.large.hidden)
        placed[: self.small.vocab, : self.small.hidden] = weight.to(placed)
        placed[:, self.small.hidden :] = self._spare
        return placed

    def _head(self, weight: Tensor) -> Tensor:
        placed = self._reader(weight, torch.arange(self.small.vocab), self.large.vocab)
        added = placed[self.small.vocab :, self.small.hidden :]
        added.normal_(1, 0.25, generator=self._random).mul_(ADDED_LOGIT / self._spare.float().sum())
        return placed

    def _mixer(self, weight: Tensor) -> Tensor:
        """A drafter's input layer: it takes the spare from the first of the vectors that it reads."""
        spare = torch.arange(self.small.hidden, self.large.hidden)
        placed = self._writer(weight, self._of_hidden(weight), weight.shape[1] // self.small.hidden * self.large.hidden)
        placed[spare, spare] = 1
        return placed

    def _bias(self, weight: Tensor) -> Tensor:
        return F.pad(weight, (0, len(self._spare))).to(self._empty)

    def _norm(self, weight: Tensor) -> Tensor:
        scale = (self.small.hidden / self.large.hidden) ** 0.5
        return (F.pad(weight, (0, len(self._spare)), value=SPARE_NORM) * scale).to(self._empty)

    def _reader(self, weight: Tensor, rows: Tensor, height: int) -> Tensor:
        """[height, n H]: random, but for `rows`, which take `weight` [rows, n h] and read nothing else."""
        placed = self._random_matrix(height, weight.shape[1] // self.small.hidden * self.large.hidden)
        placed[rows] = 0
        placed[rows[:, None], self._of_hidden(weight)] = weight.to(placed)
        return placed

    def _writer(self, weight: Tensor, columns: Tensor, width: int) -> Tensor:
        """[H, width]: zero, but for `weight` [h, columns]."""
        placed = self._empty.new_zeros(self.large.hidden, width)
        placed[: self.small.hidden, columns] = weight.to(placed)
        return placed

    def _of_hidden(self, weight: Tensor) -> Tensor:
        """Columns [n h] of one or more large hidden states, side by side, that hold the small ones."""
        states = torch.arange(weight.shape[1] // self.small.hidden)
        return (states[:, None] * self.large.hidden + torch.arange(self.small.hidden)).flatten()

    def _of_heads(self, heads: Tensor) -> Tensor:
        """All of the large model's rows of `heads`."""
        return (heads[:, None] * self.large.head_dim + torch.arange(self.large.head_dim)).flatten()

    def _widened(self, weight: Tensor) -> Tensor:
        """Rows of small heads, [n d, ...], as rows of large ones, [n D, ...]; those in between are zero."""
        heads = weight.unflatten(0, (-1, self.small.head_dim))
        wide = heads.new_zeros(len(heads), self.large.head_dim, weight.shape[1])
        wide[:, rotary_dims(self.small.head_dim, self.large.head_dim)] = heads
        return wide.flatten(0, 1)
