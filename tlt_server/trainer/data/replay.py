"""Prompts replayed through a running server, whose trainer learns from the hidden states; responses are dropped."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tlt_client import Client, SamplingParams, Status
from tlt_client.errors import TltClientError

from tlt_server.errors import ConfigError, ServerFailed

AT_A_TIME = 8
"""Batches of requests in flight that are handed over at once: between two hand-overs the server drains."""


class Line(msgspec.Struct, frozen=True):
    """Of a file of prompts; other fields are ignored. prompt: text, or the target's token ids."""

    prompt: str | tuple[int, ...]


class Replayed(NamedTuple):
    """Until now. tokens: of all responses. status: of the server."""

    responses: int
    tokens: int
    status: Status

    def __str__(self) -> str:
        versions, length = self.status.versions, self.status.accept_length.recent
        drafter = versions.drafter.live.version if versions and versions.drafter else 0
        lately = f", accept length {length:.2f} lately" if length else ""
        return f"{self.responses} responses, {self.tokens} tokens; drafter {drafter} active{lately}"


def read(path: Path) -> list[str | tuple[int, ...]]:
    """The prompts of a file with a JSON object a line. Raises ConfigError: it cannot be read, a line is no such object,
    or there is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"prompts {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [msgspec.json.decode(line, type=Line).prompt] if line.strip() else []
        except msgspec.DecodeError as error:
            remedy = 'Write {"prompt": "text"}, or token ids instead of the text'
            raise ConfigError(f"prompts {path}, line {number}: {error}. {remedy}") from error
    if not found:
        raise ConfigError(f"prompts {path}: there is none in it")
    return found


def replay(
    url: str, prompts: Sequence[str | tuple[int, ...]], responses: int, params: SamplingParams, at_once: int
) -> Iterator[Replayed]:
    """Samples `responses` to each prompt, `at_once` in flight, and says now and then how far it is. Raises
    ServerFailed: the server cannot be reached, has no trainer, or did not answer."""
    wanted = [prompt for prompt in prompts for _ in range(responses)]
    tokens, done = 0, 0
    try:
        with Client(url, max_concurrency=at_once) as client:
            if (trainer := client.status().trainer) is None or not trainer.connected:
                raise ServerFailed(f"{url} is connected to no drafter trainer: start both, it with --trainer ADDRESS")
            for first in range(0, len(wanted), at_once * AT_A_TIME):
                rollouts = client.generate_batch(wanted[first : first + at_once * AT_A_TIME], params)
                done, tokens = done + len(rollouts), tokens + sum(each.completion_tokens for each in rollouts)
                yield Replayed(done, tokens, client.status())
    except TltClientError as error:
        raise ServerFailed(f"{url}, after {done} responses: {error}") from error
