"""How much time exploration may lose."""

SAVED_S = 10.0
"""Decoding whose share may be saved up. More, and a long time in which there was nothing to explore would be followed
by a long time of nothing else."""

RESERVED_S = 3.0
"""Decoding whose share is laid by for when other weights come into force: all arms are worth a look then, at once."""
_LAID_BY = 0.15
"""Of what is earned, until the reserve is full."""


class Budget:
    """A share of the time spent decoding, earned as that time passes, and spent in advance.

    An epsilon bounds how often other arms are pulled. That is no bound on what they cost: at batch 32 a tree that
    verifies 48 tokens takes ten times as long as plain decoding, so that an epsilon of 0.1, drawn evenly, loses a tenth
    of all time. Here a pull must be affordable before it is launched, at what it is expected to lose, and is charged
    with what it lost. So what was lost exceeds the share of what has passed by the error of one expectation at most
    (one for each pull under way), which is paid back before the next.

    share: of decoding time, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._reserve = 0.0
        self.spent = 0.0
        """Seconds, in all, by pulls whose results have come."""
        self.left = 0.0
        """Seconds that may be lost now; below zero where a pull lost more than expected."""

    def earn(self, seconds: float) -> None:
        """So much time has passed decoding, exploration included."""
        earned = self._share * seconds
        laid_by = min(_LAID_BY * earned, self._share * RESERVED_S - self._reserve)
        self._reserve += laid_by
        self.left = min(self.left + earned - laid_by, self._share * SAVED_S)

    def release(self) -> None:
        """What was laid by may be spent."""
        self.left += self._reserve
        self._reserve = 0.0

    def affords(self, seconds: float) -> bool:
        """Whether a pull that loses so much may be launched. One that loses more than can be saved up waits for all."""
        return self.left >= min(seconds, self._share * SAVED_S) > 0

    def hold(self, seconds: float) -> None:
        """For a pull that is launched: what it is expected to lose."""
        self.left -= seconds

    def pay(self, held: float, lost: float) -> None:
        """For a pull that was launched: what it lost, which was expected to be what is held for it."""
        self.left += held - lost
        self.spent += lost
