"""Arms, their CUDA graphs, and how a server chooses among them."""

import msgspec


class Arm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A way to draft. As text what `--arm` takes."""

    num_steps: int
    """Draft steps, which is the depth of the tree."""
    topk: int
    """Branches per step; 1 is a chain."""
    num_draft_tokens: int
    """Tokens that one target pass verifies, the root counted."""
    source: str = "drafter"
    """`history`: drafts are what was said to the same prompt before."""

    def __str__(self) -> str:
        own = f"{self.num_steps},{self.topk},{self.num_draft_tokens}"
        return own if self.source == "drafter" else f"{self.source}:{self.num_steps}"


class CapturedPass(msgspec.Struct, frozen=True):
    """A pass of decode steps, captured as a CUDA graph for each of some batch sizes."""

    kind: str
    """`verification`, `drafting`, `draft-extend`; `plain`, of steps that do not speculate."""
    arms: tuple[Arm, ...]
    """That have it; none where it is `plain`."""
    sizes: tuple[int, ...]
    """Batch sizes, ascending."""
    gb: float
    """By how much the card's free memory fell."""
    buffers_gb: float
    """Of it, the graphs' inputs and what attention keeps for them."""
    driver_gb: float
    """Of it, what the driver keeps of the graphs."""


class CapturedArm(msgspec.Struct, frozen=True):
    """How far an arm has CUDA graphs."""

    arm: Arm
    largest: int
    """Batch size; 0: it did not fit, and the server is without it."""
    wanted: int
    """What that would be, were memory for graphs not bounded."""


class Graphs(msgspec.Struct, frozen=True):
    """The CUDA graphs of decode steps, on one GPU."""

    sharing: str
    """`pool`; `none`: each arm has all of its own."""
    gb: float
    """That they take together."""
    budget_gb: float | None
    """That they may take; None: it is not bounded."""
    arms: tuple[CapturedArm, ...]
    """None on a CPU."""
    passes: tuple[CapturedPass, ...]
    """In the order of capture; none on a CPU."""
    help: str
    """One line for a person."""


class SelectionBucket(msgspec.Struct, frozen=True):
    """Batch sizes that share what is learned of their arms."""

    first: int
    """The smallest; the largest is the one before the next bucket's."""
    arms: tuple[Arm | None, ...]
    """Those that compete; None: off, which is plain decoding."""


class StrategyUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`PUT /tlt/v1/strategy`: how to choose arms, from the next decode step on. All of it replaces what was."""

    mode: str
    """`bandit`; `paper`: BEG-MAB as published; `pinned`: one arm, and off beyond its largest batch size; `off`."""
    pinned: Arm | None = None
    """The arm of mode `pinned`; None: the first that the server was started with."""
    buckets: tuple[SelectionBucket, ...] | None = None
    """Ascending from batch size 1; None: the server's own."""
    epsilon: float = 0.1
    """Mode `paper`: how often it explores."""
    window: int = 300
    """Mode `paper`: rewards that an arm's median is taken of. The report's medians are, in every mode."""
    exploration: float = 0.015
    """Mode `bandit`: the share of decoding time that exploration may lose, against the best arm known."""


class ArmReport(msgspec.Struct, frozen=True):
    """An arm in a bucket."""

    arm: Arm | None
    """None: off."""
    pulls: int
    """Decode steps whose time counted."""
    seconds: float
    """Of those steps together."""
    median_reward: float | None
    """Committed tokens per second, of all requests together; None before the first pull."""
    expected_reward: float
    """What mode `bandit` expects, at the batch and context of the bucket's last step."""
    accept_length: float
    """Expected tokens per verify and request, the bonus token included."""
    step_ms: float
    """Expected milliseconds of a step, likewise."""


class BucketReport(msgspec.Struct, frozen=True):
    """A bucket."""

    first: int
    last: int
    active: Arm | None
    """What a batch of this size is decoded with; None: off."""
    arms: tuple[ArmReport, ...]
    in_force: Arm | None = None
    """The former name of `active`; it goes with the next release."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "in_force", self.active)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """How a server chooses arms, and what came of it."""

    mode: str
    epsilon: float
    window: int
    exploration: float
    explored_s: float
    """Seconds of decoding of mode `bandit` that exploration steps took: with other arms than the best."""
    explored_lost_s: float
    """What that cost: those seconds, less what the best arm would have taken for the same tokens."""
    decoded_s: float
    """Seconds of decoding that counted."""
    lost: int
    """Steps whose result never came; more than a few are a bug."""
    unmatched: int
    """Results of no known step; likewise."""
    buckets: tuple[BucketReport, ...]
    selecting_us: float | None = None
    """Microseconds of a decode step that go to choosing an arm and to learning from the result: mean of the last
    thousand steps with these settings; None before the first, and from an older server."""


class StepTimes(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/strategy/step_times`: sums over decode steps since these settings. The quotient over an interval
    tells something beside another interval's."""

    decoded_s: float
    """What they took."""
    usual_s: float
    """What they take when nothing else uses the machine, by timing and by what each arm's took beside the others'."""


class Speculation(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/strategy`."""

    mode: str
    """What was asked for: `bandit`, `paper`, `pinned` or `off`; `StrategyUpdate` says what they are."""
    on: bool
    """Whether decode steps may speculate now. A step does where its batch has an active arm."""
    held: str | None
    """Why they do not, though they should."""
    arm: Arm | None
    """Of the last step that speculated; None where the server was started without a drafter."""
    arms: tuple[Arm, ...] = ()
    """Those that the server was started with."""
    selection: Selection | None = None
    """None from a server without a drafter, or older than this."""
    graphs: Graphs | None = None
    """Likewise."""
