"""Patterns and grammars that would take for ever, or all memory, to compile or to match."""

import re
import warnings
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from tlt_server.api.fields.field import Server
from tlt_server.api.fields.values import MAX_GRAMMAR, MAX_STOPS
from tlt_server.errors import BadRequest

MAX_PATTERN = 4096
MAX_UNROLLED = 100_000
"""Characters of a grammar whose repetitions are written out."""
REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}
REFERENCES = {_constants.GROUPREF, _constants.GROUPREF_EXISTS}


def is_grammar(value: str, server: Server) -> None:
    """EBNF, or a pattern for xgrammar: bounded in length, nesting and what its repetitions amount to."""
    if len(value) > MAX_GRAMMAR:
        raise BadRequest(f"{len(value)} characters: at most {MAX_GRAMMAR}")
    if unrolled(value) > MAX_UNROLLED:
        raise BadRequest(f"its repetitions amount to more than {MAX_UNROLLED} characters, or nest too deep")


def is_pattern(value: str, server: Server) -> None:
    """A pattern that xgrammar compiles."""
    if len(value) > MAX_PATTERN:
        raise BadRequest(f"{len(value)} characters: at most {MAX_PATTERN}")
    is_grammar(value, server)


def is_stop_patterns(value: str | list[str], server: Server) -> None:
    """Python's patterns, which the scheduler searches for after every token: none that may backtrack for ever."""
    patterns = [value] if isinstance(value, str) else value
    if len(patterns) > MAX_STOPS:
        raise BadRequest(f"{len(patterns)} of them: at most {MAX_STOPS}")
    for pattern in patterns:
        is_pattern(pattern, server)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern)
                parsed = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            raise BadRequest(f"not a pattern: {error}") from error
        if _backtracks(parsed, repeated=False):
            raise BadRequest("a repetition within a repetition, or of alternatives that begin alike, may never end")


def unrolled(text: str) -> int:
    """Characters of a pattern or grammar with its bounded repetitions written out; more than the bound where it nests
    too deep. Quoted text, escapes and character classes count as one."""
    totals, last = [0], 0
    for token in re.finditer(
        r'\\.|"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|\{\s*(\d*)\s*,?\s*(\d*)\s*\}|.', text, re.DOTALL
    ):
        word = token.group()
        if word == "(":
            totals.append(0)
        elif word == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif word[0] == "{" and (token[1] or token[2]):
            counts = [int(digits[:9]) for digits in (token[1], token[2]) if digits]
            more = last * max(max(counts) - 1, 0)
            last, totals[-1] = last + more, totals[-1] + more
        else:
            last = 1
            totals[-1] += 1
        if len(totals) > 64 or totals[-1] > MAX_UNROLLED:
            return MAX_UNROLLED + 1
    return sum(totals)


def _backtracks(parsed: Any, repeated: bool) -> bool:
    for kind, value in parsed:
        varies = kind in REPEATS and value[0] != value[1] and value[1] > 1
        branches = value[1] if kind is _constants.BRANCH else []
        if repeated and (varies or kind in REFERENCES or (branches and _alike(branches))):
            return True
        parts = value if isinstance(value, tuple) else (value,)
        inner = [part for part in (*parts, *branches) if isinstance(part, _parser.SubPattern)]
        if any(_backtracks(part, repeated or varies) for part in inner):
            return True
    return False


def _alike(branches: list[Any]) -> bool:
    """Whether two of these may begin with the same character, as far as one sees at once."""
    first = [branch[0] if len(branch) else None for branch in branches]
    literals = [each[1] for each in first if each is not None and each[0] is _constants.LITERAL]
    return len(literals) < len(first) or len(set(literals)) < len(literals)
