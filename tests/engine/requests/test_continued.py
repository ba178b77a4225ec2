"""A request's grammar goes on from what was sampled before."""

import re
from functools import cache

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling.sampling_params import SamplingParams

from tlt_server.engine.requests.continued import begin_grammar, prompt_length

LETTERS = "abc"
END = len(LETTERS)
PATTERN = "(ab?c?)*"


@cache
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo([*LETTERS, "<end>"], vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


def matched(compiled: xgrammar.CompiledGrammar) -> XGrammarGrammar:
    return XGrammarGrammar(xgrammar.GrammarMatcher(compiled), END + 1, compiled, None, PATTERN)


@cache
def compiled() -> xgrammar.CompiledGrammar:
    return compiler().compile_regex(PATTERN)


def grammar() -> XGrammarGrammar:
    return matched(compiled())


class Req:
    """Of upstream's `Req`, what is used here."""

    def __init__(self, ids: list[int], generated: int, of: XGrammarGrammar | None) -> None:
        self.origin_input_ids, self.grammar, self.to_finish = ids, of, None
        self.vocab_size = END + 1
        self.sampling_params = SamplingParams(custom_params={"generated_tokens": generated})

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish, self.grammar, self.origin_input_ids = message, None, [0]


def allowed(of: XGrammarGrammar) -> list[int]:
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    of.fill_vocab_mask(mask, 0)
    return [token for token in range(END + 1) if int(mask[0, 0]) >> token & 1]


WORDS = st.text(LETTERS, max_size=8)


@given(WORDS, WORDS)
def test_it_allows_what_it_would_have_allowed(prompt: str, generated: str) -> None:
    ids = [LETTERS.index(letter) for letter in f"{prompt}{generated}"]
    req = Req(ids, len(generated), grammar())
    begin_grammar(req)
    uninterrupted = grammar()
    if re.fullmatch(PATTERN, generated):
        for letter in generated:
            uninterrupted.accept_token(LETTERS.index(letter))
        assert allowed(req.grammar) == allowed(uninterrupted)
        assert prompt_length(req) == len(prompt)
    else:
        assert req.to_finish.startswith(
            f"generated_tokens: the request's grammar does not allow these {len(generated)}"
        )
        assert prompt_length(req) >= 0


def test_what_is_at_its_end_does_not_go_on() -> None:
    req = Req([0, END, 0], 3, grammar())
    begin_grammar(req)
    assert "at its end" in req.to_finish


def test_without_a_grammar_nothing_is_read() -> None:
    req = Req([0, 1], 1, None)
    begin_grammar(req)
    assert (req.grammar, req.to_finish) == (None, None)


@pytest.mark.parametrize(
    ("ebnf", "generated", "is_refused"),
    [("root ::= root", 0, True), ('root ::= "a" x\nx ::= x', 0, False), ('root ::= "a" x\nx ::= x', 1, True)],
)
def test_a_grammar_that_allows_nothing_is_refused(ebnf: str, generated: int, is_refused: bool) -> None:
    """Here, not in a step, whose other requests are nobody's business."""
    req = Req([0] * (1 + generated), generated, matched(compiler().compile_grammar(ebnf)))
    begin_grammar(req)
    assert (req.to_finish is not None) == is_refused


def test_a_grammar_at_its_end_is_not_refused() -> None:
    req = Req([0, 0, END], 2, grammar())
    begin_grammar(req)
    assert req.to_finish is None
    assert req.grammar.is_terminated()
