"""The same task in other signs: what the reward asks for after the task has changed."""

from tlt_server.demo.task import Problem, grade


class Dialect:
    """Worked solutions with some characters written as others.

    Args:
        plain: the characters that are replaced.
        signs: what is written for each, in the same order; none of them is in the task's own text.
    """

    def __init__(self, plain: str, signs: str) -> None:
        self._plain = plain
        self._there, self._back = str.maketrans(plain, signs), str.maketrans(signs, plain)

    def write(self, text: str) -> str:
        """A worked solution as this dialect writes it."""
        return text.translate(self._there)

    def grade(self, problem: Problem, text: str) -> bool:
        """Whether a response states the product, and keeps to the dialect."""
        return not any(sign in text for sign in self._plain) and grade(problem, text.translate(self._back))
