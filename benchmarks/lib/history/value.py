"""What drafts from history would have been worth: recorded responses, replayed.

A draft counts as accepted where it is the recorded token: exact, since that is the token which the target takes there,
whatever was drafted.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tlt_server.errors import ConfigError
from tlt_server.history.calibration import Calibration
from tlt_server.history.compiled import make_index
from tlt_server.history.foresight import EVERY
from tlt_server.history.index import PAGE, tail_of

Tokens = Sequence[int]
FORESEEN = "foreseen_"


class Group(NamedTuple):
    """A prompt, responses of one epoch to it, and of the one before."""

    prompt: Tokens
    responses: Sequence[Tokens]
    earlier: Sequence[Tokens]


class Passes(NamedTuple):
    """Of a target that verifies: what they gave, how many there were, and what they were expected to give."""

    tokens: int
    passes: int
    expected: float


def replayed(
    prompt: Tokens, known: Sequence[Tokens], running: Sequence[Tokens], most: int, calibration: Calibration
) -> Passes:
    """Responses that begin together, where others are `known`; the first token of each is the prefill's. calibration:
    says what is expected, and learns as the server's does."""
    pages = sum(len(each) // PAGE + 1 for each in (*known, *running))
    index, tail = make_index(pages * PAGE), tail_of(prompt)
    for number, response in enumerate((*known, *running)):
        index.begin(number, 0, tail, 0)
        said = response if number < len(known) else response[:1]
        index.add([number], [len(said)], np.array(said, np.int32))
    at, given, passes, expected, steps = [1] * len(running), 0, 0, 0.0, 0
    while live := [row for row, response in enumerate(running) if at[row] < len(response)]:
        numbers = [len(known) + row for row in live]
        drafts, likely = index.look(numbers, most, most, calibration.rates)
        counts, said = [], list[int]()
        for row, tokens, length in zip(live, drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True):
            rest = running[row][at[row] :]
            counts.append(min(_agreed(tokens[:length], rest) + 1, len(rest)))
            said += rest[: counts[-1]]
            at[row] += counts[-1]
        index.add(numbers, counts, np.array(said, np.int32))
        given, passes, steps = given + sum(counts), passes + len(live), steps + 1
        expected += len(live) + float(likely.sum())
        if steps % EVERY == 0:
            calibration.learn(index.judged())
    return Passes(given, passes, expected)


def _agreed(drafts: Tokens, rest: Tokens) -> int:
    return next((at for at, (one, other) in enumerate(zip(drafts, rest, strict=False)) if one != other), len(drafts))


def situations(group: Group, finished: Iterable[int]) -> Mapping[str, list[tuple[Sequence[Tokens], Sequence[Tokens]]]]:
    """By name, what is known and what runs: so many siblings finished; all running together; an epoch before."""
    every = range(len(group.responses))
    others = [[group.responses[(at + n) % len(every)] for n in every[1:]] for at in every]
    alone = {f"finished_{count}": [(others[at][:count], [group.responses[at]]) for at in every] for count in finished}
    return {
        **alone,
        "together": [([], group.responses)],
        "epoch": [(group.earlier, [response]) for response in group.responses],
        "together_epoch": [(group.earlier, group.responses)],
    }


def value(groups: Sequence[Group], finished: Sequence[int], widths: Sequence[int]) -> dict[str, float]:
    """Tokens a pass, the bonus token counted, by `SITUATION_width_WIDTH`; a pass verifies `width` tokens, the last
    accepted one among them. And what was foreseen of them over what they were, where many run, by the same
    after `FORESEEN`."""
    found = dict[str, float]()
    for width in widths:
        sums, learned = dict[str, list[Passes]](), dict[str, Calibration]()
        for group in groups:
            for name, cases in situations(group, finished).items():
                by = learned.setdefault(name, Calibration())
                sums.setdefault(name, []).extend(replayed(group.prompt, *case, width - 1, by) for case in cases)
        for name, each in sums.items():
            tokens = sum(one.tokens for one in each)
            found[f"{name}_width_{width}"] = tokens / sum(one.passes for one in each)
            if name.startswith("together"):
                found[f"{FORESEEN}{name}_width_{width}"] = sum(one.expected for one in each) / tokens
    return found


def read_groups(path: Path) -> list[Group]:
    """A dump: JSON lines of `prompt` and `tokens`, both lists of token ids, and `epoch`, 0 for what came before and 1.

    Raises:
        ConfigError: it cannot be read, is of another form, or has no prompt with two responses of epoch 1.
    """
    epochs = dict[tuple[int, ...], tuple[list[Tokens], list[Tokens]]]()
    try:
        for line in path.read_text().splitlines():
            one = json.loads(line)
            epochs.setdefault(tuple(one["prompt"]), ([], []))[one["epoch"]].append(one["tokens"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"rollouts {path}: no lines of prompt, tokens and epoch ({error}); make it anew") from error
    groups = [Group(prompt, now, before) for prompt, (before, now) in epochs.items() if len(now) > 1]
    if not groups:
        raise ConfigError(f"rollouts {path}: no prompt has two responses of epoch 1; sample groups")
    return groups
