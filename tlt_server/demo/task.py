"""The demo's task: multiply two whole numbers, worked out in writing.

A worked solution reads

    347*6: 6*7=42 4*6=24+4=28 3*6+2=20 so 2082
    347*20: 7*2=14 2*4+1=9 2*3=6 so 6940
    6940+2082: 0+2=2 8+4=12 9+0+1=10 6+2+1=9 so 9022
    check 7+3+4=14 1+4=5, 2+6=8, 8*5=40 4+0=4, 9+2+0+2=13 1+3=4 ok
    answer 9022

The writer chooses the order of factors, partial products, terms and digits, and whether to answer, to check or to work
it out again. It slips. A failed check or two results that differ send it back for another attempt, so that lengths have
a long tail, among problems and among samples of one problem, as reasoning models' rollouts have.
"""

import random
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# one problem in so many is kept out of training
HELD_OUT = 8

SLIP = 0.08
FINISH, CHECK = 0.45, 0.3  # after a first attempt; otherwise it works the problem out again
RECHECK = 0.6  # after a later attempt that agrees with none before it

_ANSWER = re.compile(r"^answer (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """How large problems are, and how long solutions.

    sizes: digits of the two factors, and how often a problem has them. longest: characters of a solution after which no
    further attempt is begun: it stretches the tail and leaves the median.
    """

    sizes: Mapping[tuple[int, int], int]
    longest: int


DEMO = Task({(2, 1): 50, (2, 2): 25, (3, 1): 6, (3, 2): 8, (3, 3): 7, (4, 2): 4}, longest=680)
LONG = Task(
    {(2, 1): 25, (2, 2): 25, (3, 1): 8, (3, 2): 12, (3, 3): 12, (4, 2): 8, (4, 3): 6, (4, 4): 4}, longest=12_000
)


@dataclass(frozen=True)
class Problem:
    """One multiplication; `prompt` is what the model is sent and `answer` what its last line should say."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"What is {self.left}*{self.right}?\n"

    @property
    def answer(self) -> str:
        return str(self.left * self.right)


def problems(count: int, seed: int, task: Task = DEMO) -> list[Problem]:
    """`count` problems that training never saw; the same for the same seed."""
    return _draw(count, seed, task, held_out=True)


def training_problems(count: int, seed: int, task: Task = DEMO) -> list[Problem]:
    """`count` problems of the same mix, none of which `problems` can return."""
    return _draw(count, seed, task, held_out=False)


def grade(problem: Problem, text: str) -> bool:
    """Whether the last answer line of a response states the product exactly; no such line is a wrong answer."""
    stated = _ANSWER.findall(text)
    return bool(stated) and stated[-1] == problem.answer


def solve(problem: Problem, rng: random.Random, task: Task = DEMO) -> str:
    """A worked solution as the writer described above would put it down, slips and all."""
    text, results = "", list[int]()
    while True:
        lines, result = _attempt(problem, rng)
        text += lines
        if result in results or len(text) > task.longest:
            break
        dice = rng.random()
        if results:
            move = "check" if dice < RECHECK else "again"
        else:
            move = "answer" if dice < FINISH else "check" if dice < FINISH + CHECK else "again"
        results.append(result)
        if move == "check":
            line, passed = _cast_out_nines(problem, result, rng)
            text += line
            move = "answer" if passed else "again"
        if move == "answer":
            break
        text += "again\n"
    return f"{text}answer {result}\n"


def sample_texts(count: int, seed: int) -> list[str]:
    """`count` training problems with a worked solution each."""
    rng = random.Random(seed)
    return [problem.prompt + solve(problem, rng) for problem in training_problems(count, seed)]


def _draw(count: int, seed: int, task: Task, *, held_out: bool) -> list[Problem]:
    rng = random.Random(f"{seed} {held_out}")
    sizes, weights = list(task.sizes), list(task.sizes.values())
    drawn: list[Problem] = []
    while len(drawn) < count:
        pair = [rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choices(sizes, weights)[0]]
        rng.shuffle(pair)
        if _is_held_out(*pair) == held_out:
            drawn.append(Problem(*pair))
    return drawn


def _is_held_out(left: int, right: int) -> bool:
    """The same for both orders of the factors, or `12*34` would teach `34*12`."""
    return zlib.crc32(f"{min(left, right)}*{max(left, right)}".encode()) % HELD_OUT == 0


def _attempt(problem: Problem, rng: random.Random) -> tuple[str, int]:
    factors = [problem.left, problem.right]
    rng.shuffle(factors)
    whole, split = factors
    parts = [(int(digit), place) for place, digit in enumerate(reversed(str(split))) if digit != "0"]
    rng.shuffle(parts)
    text, total = _times(whole, *parts[0], rng)
    for digit, place in parts[1:]:
        line, partial = _times(whole, digit, place, rng)
        addition, total = _plus(total, partial, rng)
        text += line + addition
    return text, total


def _times(whole: int, digit: int, place: int, rng: random.Random) -> tuple[str, int]:
    """`347*20: 7*2=14 2*4+1=9 2*3=6 so 6940`"""
    steps, written, carry = list[str](), "", 0
    for factor in map(int, reversed(str(whole))):
        step, value = _multiply(factor, digit, carry, rng)
        steps.append(step)
        carry, unit = divmod(value, 10)
        written = f"{unit}{written}"
    result = int(f"{carry or ''}{written}{'0' * place}")
    return f"{whole}*{digit}{'0' * place}: {' '.join(steps)} so {result}\n", result


def _multiply(factor: int, digit: int, carry: int, rng: random.Random) -> tuple[str, int]:
    """`4*2=8`, and with a carry `4*2+1=9` or `4*2=8+1=9`."""
    product = _slip(factor * digit, (digit, factor), rng)
    factors = "*".join(_shuffled(f"{factor}{digit}", rng))
    if not carry:
        return f"{factors}={product}", product
    total = _slip(product + carry, (1, 10), rng)
    return f"{factors}{rng.choice(('', f'={product}'))}+{carry}={total}", total


def _plus(left: int, right: int, rng: random.Random) -> tuple[str, int]:
    """`6940+2082: 0+2=2 8+4=12 9+0+1=10 6+2+1=9 so 9022`"""
    steps, written, carry = list[str](), "", 0
    for digits in _columns(left, right):
        terms = [*_shuffled(digits, rng), *([str(carry)] if carry else [])]
        value = sum(map(int, terms))
        if len(terms) > 1:
            value = _slip(value, (1, 10), rng)
        steps.append("+".join(terms) + (f"={value}" if len(terms) > 1 else ""))
        carry, unit = divmod(value, 10)
        written = f"{unit}{written}"
    result = int(f"{carry or ''}{written}")
    first, second = rng.choice(((left, right), (right, left)))
    return f"{first}+{second}: {' '.join(steps)} so {result}\n", result


def _columns(left: int, right: int) -> Iterator[str]:
    """The digits of both numbers, units first; a column holds one digit where the other number has ended."""
    for place in range(max(len(str(left)), len(str(right)))):
        yield "".join(str(n)[-1 - place] for n in (left, right) if place < len(str(n)))


def _slip(value: int, distances: tuple[int, int], rng: random.Random) -> int:
    """`value`, or now and then one that is off by one of `distances`."""
    if rng.random() >= SLIP:
        return value
    return abs(value + rng.choice((-1, 1)) * rng.choice(distances))


def _shuffled(digits: str, rng: random.Random) -> list[str]:
    return rng.sample(digits, len(digits))


def _cast_out_nines(problem: Problem, result: int, rng: random.Random) -> tuple[str, bool]:
    """A check line, and whether `result` leaves the same remainder by nine as the product of the factors does."""
    left, left_root = _digit_root(problem.left, rng)
    right, right_root = _digit_root(problem.right, rng)
    product = left_root * right_root
    folded, expected = _digit_root(product, rng)
    folded = folded if product < 10 else f"{product} {folded}"
    roots = "*".join(_shuffled(f"{left_root}{right_root}", rng))
    shown, found = _digit_root(result, rng)
    passed = expected == found
    return f"check {left}, {right}, {roots}={folded}, {shown} {'ok' if passed else 'no'}\n", passed


def _digit_root(number: int, rng: random.Random) -> tuple[str, int]:
    """`347` gives `7+3+4=14 1+4=5` and 5."""
    steps = [str(number)] if number < 10 else []
    while number >= 10:
        digits = _shuffled(str(number), rng)
        number = sum(map(int, digits))
        steps.append("+".join(digits) + f"={number}")
    return " ".join(steps), number
