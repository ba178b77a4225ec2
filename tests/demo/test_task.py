"""The task: what its writer puts down is checked by reading it back."""

import random
import re
import subprocess
import sys
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.demo import task
from tlt_server.demo.task import LONG, Problem, grade, problems, sample_texts, solve, training_problems

factors = st.integers(1, 9999)


def _wrong_steps(text: str) -> list[str]:
    """The equations of a solution that do not hold; `4*6=24+4=28` says that 4*6 is 24, and that 24+4 is 28."""
    steps = [step.split("=") for step in re.findall(r"[\d+*]+(?:=[\d+*]+)+", text)]
    pairs = [pair for sides in steps for pair in pairwise(sides)]
    return [f"{left}={right}" for left, right in pairs if _value(left) != int(right.partition("+")[0])]


def _value(expression: str) -> int:
    terms = [[int(factor) for factor in term.split("*")] for term in expression.split("+")]
    return sum(term[0] * (term[1] if len(term) > 1 else 1) for term in terms)


@given(factors, factors, st.integers())
def test_a_writer_who_never_slips_is_right(left: int, right: int, seed: int) -> None:
    problem = Problem(left, right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "SLIP", 0.0)
        text = solve(problem, random.Random(seed))
    assert _wrong_steps(text) == []
    assert grade(problem, text)
    assert " no\n" not in text


@given(factors, factors, st.integers())
def test_solutions_have_the_form_that_the_docstring_shows(left: int, right: int, seed: int) -> None:
    lines = solve(Problem(left, right), random.Random(seed)).splitlines()
    forms = (r"\d+[*+]\d+: [\d*+= ]+ so \d+", r"check [\d*+=, ]+ (ok|no)", "again", r"answer \d+")
    assert all(any(re.fullmatch(form, line) for form in forms) for line in lines)
    assert [line.startswith("answer") for line in lines] == [False] * (len(lines) - 1) + [True]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12*3: 3*2=6 3*1=3 so 36\nanswer 36\n", True),
        ("answer 36", True),
        ("answer 35\nagain\nanswer 36\n", True),
        ("answer 36\nagain\nanswer 35\n", False),
        ("answer 036\n", False),
        ("answer 361\n", False),
        ("answer 36 or so\n", False),
        ("the answer 36\n", False),
        ("so 36\n", False),
        ("", False),
    ],
)
def test_grade_reads_the_last_answer_line(text: str, right: bool) -> None:
    assert grade(Problem(12, 3), text) is right


def test_problems_depend_on_the_seed_alone() -> None:
    assert problems(50, 1) == problems(50, 1)
    assert problems(50, 1)[:20] == problems(20, 1)
    assert problems(50, 1) != problems(50, 2)
    assert sample_texts(5, 1) == sample_texts(5, 1)


def test_training_never_sees_a_held_out_product_in_either_order() -> None:
    held_out = {frozenset((p.left, p.right)) for p in problems(3000, 1)}
    seen = {frozenset((p.left, p.right)) for p in training_problems(20_000, 1)}
    assert not held_out & seen


def test_solutions_are_long_tailed_varied_and_sometimes_wrong() -> None:
    rng = random.Random(0)
    drawn = problems(2000, 3)
    texts = [solve(problem, rng) for problem in drawn]
    lengths = sorted(map(len, texts))
    assert lengths[1800] >= 3 * median(lengths)
    assert 0.5 < sum(map(grade, drawn, texts)) / len(drawn) < 0.9
    assert len({solve(Problem(34, 56), rng) for _ in range(100)}) > 90


def test_the_long_task_has_half_of_its_text_in_few_long_solutions() -> None:
    rng = random.Random(0)
    lengths = [len(solve(problem, rng, LONG)) for problem in problems(1500, 3, LONG)]
    assert max(lengths) > 10_000
    assert median(lengths) < 400
    assert sum(length for length in lengths if length > 1000) > 0.45 * sum(lengths)


def test_the_task_needs_no_torch() -> None:
    code = "import sys, tlt_server.demo, tlt_server.demo.task, tlt_server.demo.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
