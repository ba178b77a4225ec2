"""The least time that a decode step's parts could take on a card: bytes and operations, counted from the models.

Counted is what the algorithm needs and no more: each pass reads its weights and the KV cache of every request once,
matmuls read and write their activations, sampling reads the logits once. Draft-extend needs the accepted tokens' rows,
and the logits of one row a request; the branches of a tree share the context they read. What is only bookkeeping
(copies, indices, building the tree) needs nothing. Everything is bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from tlt_server.config import Arm
from tlt_server.errors import ConfigError

ITEM = 2  # bytes of a bfloat16
BANDWIDTH, PEAK = 4.3, 790.0  # TB/s and TFLOP/s of dense bfloat16, measured on an H200

Place = tuple[str, str]
"""A phase (traces.py) and a group of kernels (kernels.py)."""


class Work(NamedTuple):
    """What one operation, or a chain of them that may be fused, has to move and to compute."""

    bytes: float
    operations: float = 0

    def limit_ms(self, bandwidth: float, peak: float) -> float:
        """At TB/s and TFLOP/s."""
        return max(self.bytes / bandwidth, self.operations / peak) / 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions, of one token where nothing else is said.

    inputs: width that the first layer's projections read; twice hidden for an EAGLE-3 drafter.
    joined: width of the hidden states that a drafter's input projection reads; 0 for a target.
    """

    layers: int
    hidden: int
    query: int
    key: int
    mlp: int
    vocab: int
    inputs: int
    joined: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], target: Self | None = None) -> Self:
        """From a config.json; of a drafter with its target's shape.

        Raises:
            ConfigError: an entry is missing.
        """
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            dimension = config.get("head_dim") or hidden // heads
            eagle3 = "eagle3" in str(config.get("architectures")).lower()
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                query=heads * dimension,
                key=config.get("num_key_value_heads", heads) * dimension,
                mlp=config["intermediate_size"],
                vocab=config.get("draft_vocab_size") or config["vocab_size"],
                inputs=2 * hidden if eagle3 else hidden,
                joined=0 if target is None else 3 * target.hidden if eagle3 else hidden + target.hidden,
            )
        except KeyError as error:
            raise ConfigError(f"a model's config.json has no {error}: it is not a dense decoder's") from error


@dataclass(frozen=True)
class Load:
    """What a step works on.

    arm: None where nothing is drafted.
    context: tokens in a request's KV cache.
    accept_length: tokens that a request gains by a step.
    """

    arm: Arm | None
    batch: int
    context: float
    accept_length: float = 1


def matmul(rows: float, width: int, out: int) -> Work:
    return Work(ITEM * (width * out + rows * (width + out)), 2 * rows * width * out)


def step_work(target: Shape, drafter: Shape | None, load: Load) -> dict[Place, list[Work]]:
    """The work of each part of a step; a part that is not in it needs none.

    Raises:
        ConfigError: an arm without a drafter.
    """
    arm, batch = load.arm, load.batch
    if arm is None:
        return _pass(target, "decode", batch, load) | _draw("sampling", target, batch)
    if drafter is None:
        raise ConfigError(f"arm {arm}: its drafter's config.json is missing")
    verified = batch * arm.num_draft_tokens
    work = _pass(target, "verify", verified, load) | _draw("sampling", target, verified)
    work |= _pass(drafter, "extend", batch * load.accept_length, load, scored=batch) | _draw("extend", drafter, batch)
    # the first proposals come from draft-extend; an EAGLE-3 drafter feeds itself states of its own width
    fed = replace(drafter, joined=0 if drafter.inputs > drafter.hidden else drafter.joined)
    rows, passes = batch * arm.topk, arm.num_steps - 1
    drafting = _pass(fed, "draft", rows, load) | _draw("draft", drafter, rows)
    return work | {place: parts * passes for place, parts in drafting.items()}


def _pass(shape: Shape, phase: str, rows: float, load: Load, scored: float | None = None) -> dict[Place, list[Work]]:
    """One pass of a model over `rows` tokens, of which the head reads `scored`, or all."""
    query, key, hidden = shape.query, shape.key, shape.hidden
    cached = load.batch * load.context * 2 * key
    attention = Work(ITEM * (cached + 2 * rows * query), 4 * rows * load.context * query)
    # two norms with residuals; queries and keys rotated; activation; the embedding is as small as a norm
    elementwise = Work(ITEM * rows * (8 * hidden + 2 * (query + key) + 3 * shape.mlp))
    projections = [matmul(rows, shape.inputs, query + 2 * key), matmul(rows, query, hidden)]
    mlp = [matmul(rows, hidden, 2 * shape.mlp), matmul(rows, shape.mlp, hidden)]
    return {
        (phase, "projections"): projections * shape.layers,
        (phase, "mlp"): mlp * shape.layers,
        (phase, "attention"): [attention] * shape.layers,
        (phase, "elementwise"): [elementwise] * shape.layers,
        (phase, "kv"): [Work(ITEM * rows * 4 * key)] * shape.layers,
        (phase, "head"): [matmul(rows if scored is None else scored, hidden, shape.vocab)],
        (phase, "input"): [matmul(rows, shape.joined, hidden)] if shape.joined else [],
    }


def _draw(phase: str, shape: Shape, rows: float) -> dict[Place, list[Work]]:
    """Reads the logits once."""
    return {(phase, "sampling"): [Work(ITEM * rows * shape.vocab)]}
