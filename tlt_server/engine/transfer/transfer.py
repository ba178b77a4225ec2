"""The state of a weight transfer in one scheduler process: NONE, READY once joined, OPEN between two of READY.

What waits for the trainer runs apart (`Work`): requests may decode meanwhile, and a trainer that is gone stops nobody.
All ranks hear the same messages between the same two steps, and agree in each turn on how far they are.

An update is one publication. What can be refused is, before the first byte is written; the trainer is in its broadcast
by then, so all of it is received and dropped before it hears so. An update that failed once it had written leaves the
target incomplete, until a whole one has ended.
"""

import logging
from typing import Any

from tlt_server.config import ServerConfig
from tlt_server.engine import messages
from tlt_server.engine.loading.schema import NamedTensor
from tlt_server.engine.messages import OfTransfer, Progress
from tlt_server.engine.ranks import gathered, lowest, objections
from tlt_server.engine.transfer.chunks import Described, described, receive
from tlt_server.engine.transfer.group import Group, join
from tlt_server.engine.transfer.work import Phase, Work
from tlt_server.errors import OutOfTurn, TargetIncomplete, UpdateRefused, listed

logger = logging.getLogger(__name__)

TURN_S = 0.005
"""That a turn waits for what is about to come."""


def drop(_tensors: list[NamedTensor]) -> None:
    """What is refused is received all the same: its sender waits until it is."""


class Transfer:
    """One rank's. router: the `WeightRouter`, which writes what came."""

    def __init__(self, router: Any) -> None:
        self._router, self._ranks = router, router.tp_cpu_group
        self._device = next(router.tp_worker.model_runner.model.parameters()).device
        self._timeout_s = ServerConfig.from_environment().transfer_timeout_s
        self._group: Group | None = None
        self._work: Work | None = None
        self._last: list[Described] = []
        self._joined: messages.Join | None = None
        self._open = self._held = self._moved = False
        self._failed: str | None = None

    def handle(self, ask: OfTransfer) -> Progress:
        """Raises UpdateRefused, OutOfTurn or TargetIncomplete, on all ranks alike."""
        self._moved = False
        match ask:
            case messages.Join():
                self._join(ask)
            case messages.Leave(why):
                self._leave(why)
            case messages.Open(held):
                self._begin(held)
            case messages.Receive():
                self._receive(ask)
            case messages.Advance():
                self._advance()
            case messages.Close(weight_version):
                self._end(weight_version)
        writing = self._open and self._router.state.publications.partial
        return Progress(writing, self._work is not None, self._moved, self._held, self._failed)

    # -- the group --

    def _join(self, ask: messages.Join) -> None:
        rank = self._rank(ask)
        on_gpu = self._device.type == "cuda"
        if ask.backend not in (None, "nccl" if on_gpu else "gloo"):
            has = "nccl, on GPUs" if on_gpu else "gloo, on a CPU"
            raise UpdateRefused(f"backend {ask.backend!r}: the server's tensors go by {has}")
        self._drop()
        if self._open:
            self._abandon()
        self._joined, self._last = ask, []
        self._start(Work(lambda _: join(ask, rank, self._device, self._timeout_s)))

    def _rank(self, ask: messages.Join) -> int:
        place = self._router.tp_worker.ps
        replicas = self._router.scheduler.server_args.dp_size
        first, last = ask.rank_offset, ask.rank_offset + replicas * place.tp_size - 1
        if first < 1 or last >= ask.world_size:
            raise UpdateRefused(
                f"rank_offset {first}, world_size {ask.world_size}: the trainer is rank 0, "
                f"and the server's ranks, {replicas * place.tp_size} of them, follow it"
            )
        return first + int((place.dp_rank or 0) * place.tp_size + place.tp_rank)

    def _leave(self, why: str | None) -> None:
        if why is None and self._open:
            raise OutOfTurn("a weight update is open: POST /finish_weight_update ends it")
        self._drop()
        self._failed = why

    def _drop(self) -> None:
        """Ends the group, and what is under way in it."""
        if self._work is not None:
            self._work.give_up()
        if self._group is not None:
            self._group.close()
        self._group = self._work = None

    def _start(self, work: Work) -> None:
        self._work, self._failed = work, None
        work.start()

    # -- an update --

    def _begin(self, held: bool) -> None:
        if self._group is None:
            raise OutOfTurn("there is no weight transfer: POST /init_weight_transfer_engine makes one")
        if self._open and (self._work is not None or self._router.state.publications.partial):
            raise OutOfTurn("a weight update is open, and has begun: POST /finish_weight_update ends it")
        if not self._open:
            self._router.begin("target")
        self._open, self._failed = True, None
        self._held |= held

    def _receive(self, ask: messages.Receive) -> None:
        if not self._open:
            raise OutOfTurn("no weight update is open: POST /start_weight_update opens one")
        if self._group is None:
            raise OutOfTurn("the weight transfer has ended: POST /init_weight_transfer_engine makes another")
        if self._work is not None:
            raise OutOfTurn("tensors of the update are still on their way")
        self._last = tensors = described(ask) or self._last
        if not tensors:
            raise UpdateRefused("update_info: it names no tensor, and no update before it did")
        misfit = objections(self._ranks, self._misfit(tensors))
        group, limit = self._group, self._limit(ask)

        def do(work: Work) -> None:
            receive(group, tensors, limit, self._device, drop if misfit else work.hand)

        self._start(Work(do))
        self._failed = "; ".join(misfit) or None

    def _limit(self, ask: messages.Receive) -> int | None:
        assert self._joined is not None
        packed = self._joined.packed if ask.packed is None else ask.packed
        return (ask.chunk_bytes or self._joined.chunk_bytes) if packed else None

    def _misfit(self, tensors: list[Described]) -> str | None:
        found = ((each.name, self._router.misfit(each.name, each.empty("meta"))) for each in tensors)
        return listed([f"{name}: {why}" for name, why in found if why], between="; ") or None

    def _advance(self) -> None:
        """A turn of what is under way."""
        if (work := self._work) is None:
            return
        phase = Phase(lowest(self._ranks, work.phase(TURN_S)))
        self._moved = phase is not Phase.UNDER_WAY
        if phase is Phase.FAILED:
            error = work.result if work.phase(0) is Phase.FAILED else None
            logger.error("a weight transfer failed", exc_info=error)
            said = gathered(self._ranks, error and (str(error).splitlines() or [type(error).__name__])[0])
            self._drop()
            self._failed = "; ".join(said)
        elif phase is Phase.HANDED:
            self._write(work.handed)
            work.take()
        elif phase is Phase.OVER:
            self._group = self._group or work.result
            self._work = None

    def _write(self, tensors: list[NamedTensor]) -> None:
        if self._failed is not None:
            return  # the trainer is still sending
        success, message = self._router.write(tensors)
        if not success:
            self._failed = message

    def _end(self, weight_version: str | None) -> None:
        if self._work is not None:
            raise OutOfTurn("tensors of the update are still on their way")
        if not self._open:
            return
        self._open, failed = False, self._failed
        publications = self._router.state.publications
        if publications.partial:
            publications.named(weight_version or str(publications.version + 1))
        self._router.end()
        self._held = self._held and bool(publications.missing)
        if failed is not None:
            raise OutOfTurn(f"the weight update has failed: {failed}")

    def _abandon(self) -> None:
        """Ends an update whose trainer has begun anew; what was held for it is, until the next one has ended."""
        held = self._held
        try:
            self._end(None)
        except (OutOfTurn, TargetIncomplete) as ended:
            logger.warning("a weight update was given up: %s", ended)
        self._held = held
