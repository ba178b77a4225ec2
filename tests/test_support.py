"""The support matrix: every row is walked, by SGLang's own parser, and docs/support.md prints it."""

import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt_server.errors import UnsupportedError
from tlt_server.support import FEATURES, require_supported

REPOSITORY = Path(__file__).parents[1]
DEFAULTS = ["--model-path", "m", "--speculative-draft-model-path", "d", "--speculative-eagle-topk", "1"]
# the test that shows each row that works
SHOWN = {
    "EAGLE, chain": "tests/server/test_lossless.py",
    "EAGLE, tree": "tests/server/test_lossless.py",
    "EAGLE-3, chain": "tests/server/test_lossless.py",
    "EAGLE-3, tree": "tests/server/test_lossless.py",
    "Several tokenizer workers": "tests/server/test_processes.py",
    "Tensor parallelism (TP)": "tests/server/test_processes.py",
    "Data parallelism (DP)": "tests/server/test_processes.py",
    "MTP: a draft head that belongs to the target": "tests/server/test_mtp.py",
    "Deterministic inference": "tests/server/test_deterministic.py",
    "Memory saver": "tests/server/test_release.py",
    "Routed experts of a response": "tests/server/test_routed_experts.py",
}


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def parsed(parser: ArgumentParser, flags: str) -> SimpleNamespace:
    """The settings that flags give, as they are before SGLang looks at the model; tp_size and so on by their names."""
    words = flags.replace("FILE", "/tmp/map.pt").split()
    algorithm = [] if "--speculative-algorithm" in words else ["--speculative-algorithm", "EAGLE"]
    args = vars(parser.parse_args([*DEFAULTS, *algorithm, *words]))
    return SimpleNamespace(**args)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_row_is_what_it_says(parser: ArgumentParser, feature) -> None:  # type: ignore[no-untyped-def]
    args = parsed(parser, feature.flags)
    assert feature.used(args)
    if feature.refusal is None:
        require_supported(args)
        assert (REPOSITORY / SHOWN[feature.name]).exists()
    else:
        with pytest.raises(UnsupportedError, match=re.escape(f"{feature.name} ({feature.flags}): {feature.refusal}")):
            require_supported(args)


def test_nothing_is_refused_without_speculation(parser: ArgumentParser) -> None:
    for feature in FEATURES:
        args = parsed(parser, feature.flags)
        args.speculative_algorithm = None
        require_supported(args)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--speculative-algorithm EAGLE3", "a head of its own"),
        ("--speculative-algorithm NEXTN", "a head of its own"),
        ("--tp-size 2", "lies on 2 GPUs"),
    ],
)
def test_a_part_of_the_head_is_refused_where_there_is_no_whole_one(
    parser: ArgumentParser, flags: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"draft_vocab = 512: .*{reason}"):
        require_supported(parsed(parser, flags), 512)
    require_supported(parsed(parser, flags), 0)
    require_supported(parsed(parser, ""), 512)
