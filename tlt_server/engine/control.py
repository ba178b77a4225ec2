"""What reaches a scheduler between two steps: our own messages are answered here, upstream's are seen and passed on."""

import logging
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    TltReqInput,
    TltReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tlt_client.schemas import SharedTarget

from tlt_server.engine import messages
from tlt_server.engine.decode.crediting import stamping_launched
from tlt_server.engine.features.sharing import Sharing
from tlt_server.engine.messages import Answer, Ask, pack, unpack_ask
from tlt_server.engine.requests.aborts import answer_waiting
from tlt_server.engine.requests.eras import renaming_waiting
from tlt_server.engine.requests.held import all_answered, flush_under_load, queue_what_ends
from tlt_server.engine.requests.intake import handle
from tlt_server.engine.weights.drafter import Drafter
from tlt_server.engine.weights.publications import require_whole
from tlt_server.errors import ConfigError, OutOfTurn, UpdateRefused

logger = logging.getLogger(__name__)

# seconds for a step that began before the last results were read; prefilling a chunk takes some
LAST_STEP_S = 10.0

UPDATES = (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
)


def dispatch(scheduler: Any, recv_req: Any) -> Any:
    """Handles one message of a scheduler's; returns what is to be sent back, or None."""
    with stamping_launched(scheduler), renaming_waiting(scheduler):
        if isinstance(recv_req, TltReqInput):
            return _answered(scheduler, recv_req)
        state = scheduler.weight_updater.state
        output = _passed_on(scheduler, recv_req)
        if isinstance(recv_req, UPDATES):
            state.speculation.interrupted()
        if isinstance(recv_req, UPDATES) and output.success and state.drafter is not None:
            # told alike on all ranks: when a publication ends by silence, each of them knows by its own clock
            state.drafter.watchdog.hear("target")
        return output


def _passed_on(scheduler: Any, recv_req: Any) -> Any:
    """To SGLang, what trainers do around a publication being noted. A scheduler that is held is idle only once its
    requests are put aside, which upstream waits for."""
    state, memory = scheduler.weight_updater.state, scheduler.weight_updater.memory
    if isinstance(recv_req, PauseGenerationReqInput):
        state.publications.paused()
        state.speculation.interrupted()
    elif isinstance(recv_req, ContinueGenerationReqInput):
        state.publications.continued()
    elif isinstance(recv_req, FlushCacheReqInput):
        state.publications.flushed()
        if scheduler._engine_paused:
            flush_under_load(scheduler, empty_cache=True)
            return FlushCacheReqOutput(success=True)
        if all_answered(scheduler):
            recv_req.timeout_s = max(recv_req.timeout_s or 0.0, LAST_STEP_S)
    elif isinstance(recv_req, AbortReq):
        if scheduler._engine_paused:
            queue_what_ends(scheduler, recv_req)
        answer_waiting(scheduler, recv_req)
    output = handle(scheduler, recv_req)
    if isinstance(recv_req, PauseGenerationReqInput):
        memory.paused()
    elif isinstance(recv_req, ContinueGenerationReqInput):
        memory.continued()
    if scheduler._engine_paused and isinstance(recv_req, PauseGenerationReqInput | AbortReq):
        # upstream tells its load when a step is done; trainers abort until it is none, and none is done now
        scheduler.publish_load_snapshot(force=True)
    return output


def _answered(scheduler: Any, recv_req: Any) -> TltReqOutput | None:
    """The edge beyond which an exception would end the server."""
    try:
        ask, state = unpack_ask(recv_req.body), scheduler.weight_updater.state
        answer = None  # of some messages nobody waits for one: it would be taken for that of another
        match ask:
            case messages.Pausing():
                state.publications.paused()
            case messages.Announce(table):
                state.speculation.hear(table)
            case messages.Probe(why):
                _drafter(state).probe(why)
            case _:
                answer = _answer(scheduler, ask)
    except UpdateRefused as refused:
        answer = Answer(refusal=str(refused), out_of_turn=isinstance(refused, OutOfTurn))
    except ConfigError as error:
        answer = Answer(refusal=str(error), invalid=True)
    except Exception as error:
        logger.exception("a control message failed")
        answer = Answer(failure=f"{type(error).__name__}: {error}")
    return None if answer is None else TltReqOutput(body=pack(answer))


def _answer(scheduler: Any, ask: Ask) -> Answer:
    router = scheduler.weight_updater
    state, progress = router.state, None
    state.publications.tick()
    match ask:
        case messages.ReadVersions() | messages.Pausing() | messages.Announce() | messages.Probe():
            pass
        case messages.ReadEvents(after):
            return Answer(events=state.events.after(after))
        case messages.ReadStepTimes():
            return Answer(step_times=state.speculation.step_times())
        case messages.HearTrainer(trainer):
            state.hear_trainer(trainer)
        case messages.ReadLearned():
            _require_arms(state)
            return Answer(learned=state.speculation.learned())
        case messages.Wish() | messages.Learn():
            _choose(state, ask)
        case messages.LoadHistory() | messages.ForgetHistory():
            _remember(scheduler, ask)
        case messages.Share(path):
            router.memory.require_weights()
            return Answer(shared=_shared(scheduler, path))
        case messages.Offer() | messages.Commit() | messages.RollBack() | messages.Freeze() | messages.SetWatchdog():
            _steer(router, ask)
        case _ if isinstance(ask, messages.OfTransfer):
            progress = router.transfer.handle(ask)
        case _:
            _publish(router, ask)
    return Answer(
        versions=state.versions(),
        progress=progress,
        offloaded=sorted(router.offload_tags),
        speculation=state.speculation.describe(),
        history=None if state.history is None else state.history.describe(),
        trainer=state.trainer,
        devices=state.devices,
        held=scheduler._engine_paused,
        weight_version=state.publications.sampling[0],
    )


def _choose(state: Any, ask: messages.Wish | messages.Learn) -> None:
    _require_arms(state)
    match ask:
        case messages.Wish(update):
            state.speculation.wish(update)
        case messages.Learn(learned):
            state.speculation.learn(learned)


def _remember(scheduler: Any, ask: messages.OfHistory) -> None:
    state = scheduler.weight_updater.state
    if state.history is None:
        return  # the answer says so
    match ask:
        case messages.LoadHistory(given):
            state.history.load(given, scheduler.model_config.vocab_size)
        case messages.ForgetHistory(namespace):
            state.history.forget(namespace)


def _publish(router: Any, ask: messages.OfWeights) -> None:
    publications = router.state.publications
    match ask:
        case messages.Begin(selector, allow_partial):
            router.begin(selector, allow_partial=allow_partial)
        case messages.End():
            router.end()
        case messages.Continuing():
            require_whole(publications.continued())
        case messages.Name(weight_version):
            publications.named(weight_version)
        case messages.Hold(on, tags):
            router.memory.promise(tags, on=on)
        case messages.Release(tags):
            if router.state.sharing is not None:
                router.state.sharing.wait()  # it reads what may be offloaded
            router.memory.release(tags)
        case messages.Resume(tags):
            router.memory.take_back(tags)


def _steer(router: Any, ask: messages.OfDrafter) -> None:
    drafter = _drafter(router.state)
    if isinstance(ask, messages.Offer | messages.Commit | messages.RollBack):
        router.memory.require_weights()
    match ask:
        case messages.Offer():
            drafter.offer(ask)
        case messages.Commit(version):
            drafter.commit(version)
        case messages.RollBack():
            drafter.roll_back("it was asked for")
        case messages.Freeze(frozen):
            drafter.freeze(frozen)
        case messages.SetWatchdog(mode):
            drafter.set_watchdog(mode)


def _shared(scheduler: Any, path: str) -> SharedTarget | None:
    """None until it is written, and from replicas other than the first: they have the same target."""
    if (scheduler.ps.dp_rank or 0) > 0:
        return None
    sharing: Sharing | None = scheduler.weight_updater.state.sharing
    if sharing is None:
        raise UpdateRefused("with pipeline stages or DP attention a server cannot give its embedding and head away yet")
    return sharing.share(path)


def _require_arms(state: Any) -> None:
    if not state.speculation.there:
        _drafter(state)


def _drafter(state: Any) -> Drafter:
    drafter: Drafter | None = state.drafter
    if drafter is None:
        raise OutOfTurn("this server was started without a drafter")
    return drafter
