"""Which weights an update touches, and what becomes of it: upstream's four routes, each all or nothing.

Upstream loads a target into an external drafter too (disk, IPC, tensor), ends the server where a tensor does not fit
or where it should flush its cache while a request is running, and remembers a path that it failed to load.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    CheckWeightsReqOutput,
    DestroyWeightsUpdateGroupReqOutput,
    GetWeightsByNameReqOutput,
    InitWeightsUpdateGroupReqOutput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

from tlt_server.engine.loading.schema import NamedTensor, holds_as_published, start_schema
from tlt_server.engine.ranks import lowest
from tlt_server.engine.requests.held import flush_under_load
from tlt_server.engine.transfer.transfer import Transfer
from tlt_server.engine.weights.admission import Admission, TargetFit, Update, direct_misfit
from tlt_server.engine.weights.checking import check_weights
from tlt_server.engine.weights.groups import join
from tlt_server.engine.weights.head import Head, check_selector, head_of
from tlt_server.engine.weights.memory import MemoryOffload
from tlt_server.engine.weights.publications import incomplete, no_gaps, require_whole
from tlt_server.engine.weights.state import state_of
from tlt_server.errors import UpdateRefused
from tlt_server.metrics import count_target_update

logger = logging.getLogger(__name__)

Outcome = tuple[bool, str]
Load = Callable[[Any], Outcome | None]
"""None: done, and nothing to say of it."""
PART = {"weight_version": None, "selector": None, "flush_cache": False}
"""What of an update request a transfer's part says, whose session says the rest."""


class WeightRouter(SchedulerWeightUpdaterManager):
    """Upstream's weight updater, in each scheduler process; the scheduler calls its methods between two steps. An
    exception in one of them would end the server, so each answers `success=False` and the reason instead."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        runner = self.tp_worker.model_runner
        fits = holds_as_published(runner.model_config)
        self._fit = fit = TargetFit(runner.model, start_schema(runner)) if fits else None
        self._head = head_of(self.draft_worker)
        self._admission = Admission(runner.model, fit, self.tp_cpu_group, self._head)
        self._session_selector: str | None = None
        self.state = state_of(self.scheduler, fit.gaps if fit else no_gaps)
        self.memory = MemoryOffload(
            self,
            getattr(self.draft_worker, "weights", None),
            self.state.events,
            super().release_memory_occupation,
            super().resume_memory_occupation,
        )
        self.transfer = Transfer(self)

    def begin(self, selector: str | None, *, allow_partial: bool = False) -> None:
        """Opens a session: a publication until `end`, whose calls go to `selector` unless they say otherwise."""
        check_selector(self._head, selector)
        self.state.publications.begin(allow_partial=allow_partial)
        self._session_selector = selector
        self._end_head()

    def end(self) -> None:
        """Raises TargetIncomplete, UpdateRefused: the session's publication has ended, and lacks something of the
        target or of its MTP head."""
        missing = self.state.publications.end()
        self._session_selector = None
        require_whole(missing)
        if why := self._end_head():
            raise UpdateRefused(f"{why}. Send all of the head, or none")

    def write(self, tensors: list[NamedTensor]) -> Outcome:
        """A part of an open session's update, as a transfer brings it (engine/transfer)."""
        load = self.tp_worker.model_runner.model.load_weights
        return self._update("transfer", SimpleNamespace(**PART), lambda _: load(tensors) and None)

    def misfit(self, name: str, tensor: torch.Tensor) -> str | None:
        """Why the target cannot take a tensor of this shape and dtype; None where it can, or nobody knows."""
        return self._fit.misfit(name, tensor) if self._fit else None

    # -- upstream's routes --

    def update_weights_from_disk(self, recv_req: Any) -> UpdateWeightFromDiskReqOutput:
        if self.state.speculation.there:  # SGLang would capture the widest arm anew; graphs read weights in place
            recv_req.recapture_cuda_graph = False
        success, message = self._update("disk", recv_req, self.tp_worker.update_weights_from_disk)
        return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)

    def update_weights_from_tensor(self, recv_req: Any) -> UpdateWeightsFromTensorReqOutput:
        success, message = self._update("tensor", recv_req, self._load_tensors)
        return UpdateWeightsFromTensorReqOutput(success=success, message=message)

    def update_weights_from_distributed(self, recv_req: Any) -> UpdateWeightsFromDistributedReqOutput:
        success, message = self._update("distributed", recv_req, self.tp_worker.update_weights_from_distributed)
        return UpdateWeightsFromDistributedReqOutput(success=success, message=message)

    def update_weights_from_ipc(self, recv_req: Any) -> UpdateWeightsFromIPCReqOutput:
        success, message = self._update("ipc", recv_req, self.tp_worker.update_weights_from_ipc)
        return UpdateWeightsFromIPCReqOutput(success=success, message=message)

    def init_weights_update_group(self, recv_req: Any) -> InitWeightsUpdateGroupReqOutput:
        success, message = _answered(partial(join, self.tp_worker.model_runner.weight_updater), recv_req)
        said = "Succeeded to initialize custom process group." if success else message
        return InitWeightsUpdateGroupReqOutput(success=success, message=said)

    def destroy_weights_update_group(self, recv_req: Any) -> DestroyWeightsUpdateGroupReqOutput:
        success, message = _answered(self.tp_worker.destroy_weights_update_group, recv_req)
        return DestroyWeightsUpdateGroupReqOutput(success=success, message=message)

    def release_memory_occupation(self, recv_req: Any) -> ReleaseMemoryOccupationReqOutput:
        """For who holds SGLang's engine in process: this answer has no room for a reason, unlike that of our route."""
        success, message = _answered(lambda request: self.memory.release(request.tags), recv_req)
        if not success:
            logger.error("no memory is released: %s", message)
        return ReleaseMemoryOccupationReqOutput()

    def resume_memory_occupation(self, recv_req: Any) -> ResumeMemoryOccupationReqOutput:
        success, message = _answered(lambda request: self.memory.take_back(request.tags), recv_req)
        if not success:
            logger.error("no memory is taken back: %s", message)
        return ResumeMemoryOccupationReqOutput()

    def get_weights_by_name(self, recv_req: Any) -> GetWeightsByNameReqOutput:
        """None of what is released: reading it would end the server."""
        if not self.memory.has_weights:
            return GetWeightsByNameReqOutput(parameter=None)
        return super().get_weights_by_name(recv_req)

    def check_weights(self, recv_req: Any) -> CheckWeightsReqOutput:
        try:
            return check_weights(self, recv_req)
        except UpdateRefused as refused:
            return CheckWeightsReqOutput(success=False, message=str(refused))

    def reset(self) -> None:
        """What is active is about to be no target any more."""
        self._await_running_step()
        self.state.target_era += 1
        self.state.publications.reset()

    # -- one update --

    def _update(self, route: str, recv_req: Any, load: Load) -> Outcome:
        """Makes one update on all ranks, or on none."""
        config = self.tp_worker.model_runner.model_config
        path = config.model_path
        selector = recv_req.selector or self._session_selector
        publications = self.state.publications
        alone = route == "disk" or (selector == "draft" and not publications.in_session)
        whole = alone and not publications.may_be_partial
        if not publications.in_session and publications.begins(recv_req.weight_version):
            self._end_head()
        with self._observe_weight_load(route), self._admission.update(selector, whole=whole) as update:
            self._await_running_step()
            success, message = self._attempt(update, recv_req, load)
            if selector == "draft":
                # override: upstream notes whose weights it loaded
                config.model_path = path
            else:
                self._note(recv_req.weight_version, update, success=success)
            if self._head is not None:
                message = f"{message} {self._follow(self._head, update, success=success)}".rstrip()
            if not success:
                # override: upstream leaves the path of an update that failed
                config.model_path = path
            elif recv_req.flush_cache:
                flushed, said = _answered(self._flush, recv_req)
                success = flushed
                message = f"{message} {said}".strip() if flushed else f"Written, but the cache is not flushed: {said}"
            if not success:
                logger.error("weight update by %s: %s", route, message)
        if self.tp_worker.ps.tp_rank == 0:
            count_target_update(route, success)
        return success, message

    def _attempt(self, update: Update, recv_req: Any, load: Load) -> Outcome:
        """Loads, and agrees with the other ranks on what became of it."""
        success, message = _answered(partial(self._to_target, update, load), recv_req)
        try:
            if update.refusal is None:
                update.vote(None if success else message)
                return success, message
        except UpdateRefused as refused:
            logger.debug("refused after loading: %s", refused)
        if update.wrote:
            return False, f"{update.refusal}. Some weights were written before it failed: send the whole update again"
        return False, f"{update.refusal}. No weight was changed"

    def _to_target(self, update: Update, load: Load, recv_req: Any) -> Outcome | None:
        """`all` is the target too, and its MTP head: an external drafter has other tensors, and a way of its own. So is
        what trainers send that know of neither, with or without `disable_draft_model`."""
        try:
            self.memory.require_weights()
            check_selector(self._head, update.selector, getattr(recv_req, "load_format", None))
        except UpdateRefused as refused:
            if not isinstance(recv_req, UpdateWeightsFromDistributedReqInput):
                raise
            update.objection = str(refused)
        return load(recv_req)

    def _note(self, weight_version: str | None, update: Update, *, success: bool) -> None:
        if not success and lowest(self.tp_cpu_group, not update.wrote):
            self.state.publications.refused(weight_version)
            return
        self.state.target_era += 1
        past_us = success and not update.wrote  # a loader of the user's own, which need not call the model's
        names = None if past_us else update.names
        self.state.publications.wrote(weight_version, names, torn=not success)

    def _follow(self, head: Head, update: Update, *, success: bool) -> str:
        """Makes the MTP head active once all of it has come, on all ranks. Returns what is to be said of it."""
        drafter, publications = self.state.drafter, self.state.publications
        assert drafter is not None
        if not success or drafter.frozen:
            head.drop()
        if not success:
            return ""
        if update.selector == "target":
            return ""
        enough = head.came and (publications.may_be_partial or not head.missing)
        if lowest(self.tp_cpu_group, int(enough)):
            head.drop()
            drafter.follow(publications.version + publications.partial)
        elif not head.came:
            why = "it is frozen" if drafter.frozen else "nothing of it was sent"
            return f"The MTP head stays version {drafter.live.version}: {why}."
        return ""

    def _flush(self, recv_req: Any) -> Outcome:
        missing = self.state.publications.flushed()
        flush_under_load(self.scheduler, empty_cache=recv_req.torch_empty_cache)
        return True, f"But {incomplete(missing)}." if missing else ""

    def _load_tensors(self, recv_req: Any) -> Outcome:
        """As upstream's worker does, with the tensors in hand before the first is written."""
        tensors = self.tp_worker._deserialize_own_rank(recv_req.serialized_named_tensors)
        runner = self.tp_worker.model_runner
        if recv_req.load_format == "direct":
            rank = self.tp_worker.ps.tp_rank
            whole = [
                (name, each.get(rank) if isinstance(each, LocalSerializedTensor) else each) for name, each in tensors
            ]
            tensors = self._admission.admit(whole, direct_misfit(runner.model))
        direct = self._admission.writing() if recv_req.load_format == "direct" else nullcontext()
        with direct:
            outcome: Outcome = runner.weight_updater.update_weights_from_tensor(
                named_tensors=tensors, load_format=recv_req.load_format
            )
        return outcome

    def _end_head(self) -> str | None:
        """Whatever of an MTP head has come belongs to a publication that has ended; returns why it was not all."""
        if self._head is None or (why := self._head.ended()) is None:
            return None
        self.state.events.add("drafter_refused", version=self.state.publications.version, why=why)
        return why

    def _await_running_step(self) -> None:
        """Orders what follows behind the step that may still be running on the GPU.

        Upstream orders the scheduler's stream behind that step's reads of the batch only, which end before its graph is
        replayed: weights written now would race with it.
        """
        if self.scheduler.enable_overlap:
            self.scheduler.schedule_stream.wait_stream(self.scheduler.forward_stream)


def _answered(make: Load, recv_req: Any) -> Outcome:
    """What `make` answers, or why it failed: the edge beyond which an exception ends the server."""
    try:
        return make(recv_req) or (True, "")
    except UpdateRefused as refused:
        return False, str(refused)
    except Exception as error:
        logger.exception("a weight update failed")
        return False, f"{type(error).__name__}: {error}"
