"""The drafter trainer as a process: it hears servers, gathers features, trains, and publishes what is better.

One thread trains. Others keep the control link (`Sender`), take in features (`Intake`) and show the status. Under
torchrun this is rank 0; the others help in steps (helper.py).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tlt_server.drafter.target import CPU
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.results import git_revision
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.inbox import Inbox
from tlt_server.trainer.data.intake import Intake
from tlt_server.trainer.learn.demands import Demands
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.memory import release, relieve
from tlt_server.trainer.learn.packing import pack
from tlt_server.trainer.publish.folder import Drafter, load_frozen
from tlt_server.trainer.publish.judge import Judge, Verdict
from tlt_server.trainer.publish.publisher import Publisher
from tlt_server.trainer.servers import Servers
from tlt_server.trainer.status import Status
from tlt_server.trainer.workers import Workers
from tlt_server.wire.sharing import Fetcher
from tlt_server.wire.sockets import Inlet
from tlt_server.wire.trainer import Sender

log = logging.getLogger(__name__)

IDLE_S = 0.05
"""Until it is seen what there is to do, while no features arrive; where steps are asked for, a tenth of that."""
MOST_IN_VAIN = 16
"""Doublings of what a trainer waits whose drafters are not kept; 65,536 times as long is never."""

RECENT = 0.1
"""Weight of the last step in what happened lately."""


@dataclass
class Parts:
    """What a service is made of; each is its own. device: to train on."""

    config: TrainConfig
    device: torch.device
    drafter: Drafter
    trainer: Trainer
    buffer: Buffer
    judge: Judge
    checkpoints: Checkpoints
    publisher: Publisher
    servers: Servers
    workers: Workers
    inlet: Inlet
    inbox: Inbox
    fetcher: Fetcher
    sender: Sender

    def move(self, device: torch.device) -> None:
        """All that trains and judges, to the device or off it."""
        self.trainer.move(device)
        self.judge.move(device)


class Service:
    """The loop; `is_over` is asked between two steps. demands: when it trains; None: whenever there are features."""

    def __init__(self, parts: Parts, is_over: Callable[[], bool], demands: Demands | None = None) -> None:
        self._parts, self._config, self._is_over, self._demands = parts, parts.config, is_over, demands
        self._intake = Intake(parts.inlet, parts.inbox, parts.buffer)
        self._judgement_is_due = self._took = False  # took: memory, for passes
        self._judged_for, self._in_vain = -1, 1  # in_vain: drafters in a row that were not kept, and one
        self._saved, self._learnt, self._rate = parts.trainer.steps, 0, 0.0
        self._loss: float | None = None
        self._revision, self._state = git_revision(), "waiting for a server"
        self.status = self._status()

    def run(self) -> None:
        """Until it is told to end; saves what it has learnt then. Raises ConfigError: the drafter that was published
        last is damaged. Raises RankLost: another process of this trainer is gone."""
        with self._parts.publisher.open(), self._intake.open():
            self._serve()
        self._save()

    def _serve(self) -> None:
        while not self._is_over():
            self._intake.check()
            self._parts.publisher.collect()
            if not self._is_amid():
                self._catch_up()
            self._give_back()
            self._judgement_is_due |= self._demands is not None and self._demands.is_due()
            present = self._parts.workers.training()
            if waits_for := self._waits_for(present):
                self._state = waits_for
                self._rest()
                self._intake.wait(IDLE_S / 10 if self._demands else IDLE_S)
            else:
                self._train(present)
            if 0 in present and self._may_judge():
                self._judge()
            self.status = self._status()
            if self._demands and not self._judgement_is_due:
                self._demands.settle(on_its_way=self._is_on_its_way())

    # -- what comes in --

    def _is_amid(self) -> bool:
        """Whether steps that were asked for are being taken, by features of the target that embedding and head are of:
        another one, which an RL trainer publishes meanwhile, is followed after them. Nothing of it was sampled yet."""
        begun = self._demands is not None and self._demands.is_amid()
        return begun and self._parts.buffer.newest == self._parts.trainer.frozen.version

    def _catch_up(self) -> None:
        """With the servers' newest target."""
        parts, newest = self._parts, self._parts.servers.targets.newest
        if newest > parts.buffer.newest:
            parts.buffer.advance(newest)
        if newest > parts.trainer.frozen.version:
            self._follow(newest)

    def _follow(self, target: int) -> None:
        """Takes up what the drafter shares with a new target, where it can be had."""
        parts, servers = self._parts, self._parts.servers
        if (folder := servers.shared(target)) is None:
            if (source := servers.elsewhere(target)) is not None:
                parts.fetcher.want(source)
            return
        try:
            before = parts.trainer.frozen
            parts.trainer.frozen = load_frozen(folder, target, before.head.dtype, before, parts.trainer.device)
        except ConfigError as error:
            log.warning("target %d: what drafters share with it cannot be used: %s", target, error)
            servers.forget(target)

    def _give_back(self) -> None:
        """Frees the devices that rollouts need again."""
        parts = self._parts
        for rank in parts.workers.asked():
            if rank == 0:
                parts.move(CPU)
                release(parts.device)
            else:
                parts.trainer.team.free(rank)
            parts.workers.yielded(rank)

    def _rest(self) -> None:
        """Leaves what passes took of the device to who asks for steps, and uses it in between."""
        if self._demands and self._took and not self._demands.left:
            self._took = False
            relieve(self._parts.device)

    def _waits_for(self, present: Sequence[int]) -> str:
        """Why not to train now; empty where there is no reason. present: ranks that may."""
        parts = self._parts
        if parts.servers.targets.newest < 0:
            return "waiting for a server"
        if 0 not in present:
            return "waiting for rollouts on its GPU"
        if parts.trainer.frozen.version < parts.buffer.newest:  # which `_catch_up` has advanced to the servers'
            return "waiting for the target's embedding and head"
        if self._demands:
            return "" if self._demands.left else "waiting to be asked"
        config, received = self._config, parts.inbox.received
        return "waiting for features" if received < config.entries or self._learnt >= config.passes * received else ""

    # -- training --

    def _train(self, present: Sequence[int]) -> None:
        """One step of these ranks, and what is due after it."""
        parts, began = self._parts, time.monotonic()
        runs = parts.buffer.draw(self._config.entries * len(present), parts.trainer.random)
        # features of a newer target may have come in since: its embedding and head first
        if not runs or parts.buffer.newest > parts.trainer.frozen.version:
            self._state = "waiting for features"
            self._intake.wait(IDLE_S)
            return
        self._state = "training"
        self.status = self._status()  # the first step may take long: kernels are compiled
        parts.move(parts.device)
        self._took, parts.trainer.team.present = True, present
        packs = pack(runs, self._config.entries, parts.device)
        with parts.workers.computing(parts.device, sum(len(each.tokens) for each in packs)):
            metrics = parts.trainer.step(packs)
        learnt = sum(run.learnt for run in runs)
        self._learnt += learnt
        rate, self._loss = learnt / (time.monotonic() - began), metrics.loss
        self._rate += (RECENT if self._rate else 1.0) * (rate - self._rate)
        if metrics.skipped:
            log.warning("step %d: nothing was learnt: %s", metrics.step, metrics.skipped)
        is_new = parts.trainer.frozen.version > self._judged_for  # at once, for the active drafter has gone stale
        is_due = self._demands.take() if self._demands else is_new or metrics.step % self._config.gate.every == 0
        self._judgement_is_due |= is_due
        if metrics.step % self._config.checkpoint_every == 0:
            self._save()

    def _may_judge(self) -> bool:
        """Whether a judgement is due; not while the last drafter is on its way, or on a slow link each would be
        overtaken by the next and none arrive."""
        has_followed = self._parts.trainer.frozen.version >= self._parts.servers.targets.newest
        return self._judgement_is_due and has_followed and not self._is_on_its_way()

    def _is_on_its_way(self) -> bool:
        publisher = self._parts.publisher
        is_sent = publisher.edition is not None and self._parts.servers.is_on_its_way(publisher.newest)
        return publisher.is_busy or is_sent

    def _judge(self) -> None:
        """Publishes the drafter in training, where it is better than the active one."""
        parts, self._judgement_is_due = self._parts, False
        parts.move(parts.device)
        held_out = parts.buffer.held_out(self._config.gate.entries)
        if parts.buffer.newest > parts.trainer.frozen.version:
            return
        steps = parts.trainer.steps - (parts.publisher.edition.steps if parts.publisher.edition else 0)
        moved = parts.trainer.frozen.version > parts.publisher.target
        rejected = self._rejected()
        if rejected is not None and not moved and steps < self._config.gate.every << self._in_vain:
            return
        with parts.workers.computing(parts.device):
            verdict = parts.judge.compare(parts.trainer, held_out, parts.servers.drafter, rejected)
        if verdict is None:
            return
        self._judged_for = parts.trainer.frozen.version
        if reason := self._config.policy.reason(verdict.judged, target_moved=moved, steps=steps):
            self._in_vain = 1 if rejected is None or moved else min(self._in_vain + 1, MOST_IN_VAIN)
            self._publish(verdict, reason)

    def _rejected(self) -> int | None:
        """The drafter that was published last, where the servers did not keep it: what is held out does not tell all,
        or it is not what they serve now. The next must be better than that one too, and each waits twice as long."""
        newest = self._parts.publisher.newest
        return None if self._is_on_its_way() or self._parts.servers.drafter >= newest else newest

    def _publish(self, verdict: Verdict, reason: str) -> None:
        parts, judged = self._parts, {"temperature": f"{self._config.gate.temperature:g}"}
        judged["accepted"] = " ".join(f"{share:.4f}" for share in verdict.judged.candidate_reaches)
        version = 1 + max(parts.servers.newest_drafter, parts.publisher.newest)
        drafter = replace(parts.drafter, network=verdict.network)
        parts.judge.publish(version, drafter)
        target, provenance = parts.trainer.frozen.version, self._provenance() | judged
        parts.publisher.publish(drafter.copied(), version, target, provenance, reason)

    def _save(self) -> None:
        if (steps := self._parts.trainer.steps) > self._saved:
            tensors, facts = self._parts.trainer.state()
            facts |= {"config": self._parts.drafter.config, "provenance": self._provenance()}
            self._saved = steps
            try:
                self._parts.checkpoints.save(steps, tensors, facts)
            except DiskFailed as error:
                log.error("%s. Training goes on", error)

    def _provenance(self) -> dict[str, str]:
        """Where the drafter's weights come from. trained_on: target version, as the servers count."""
        trainer = self._parts.trainer
        trained_on = self._parts.servers.targets.count_of(trainer.frozen.version)
        facts = {"target": self._config.target, "revision": self._revision, "trained_on": trained_on}
        return {key: str(each) for key, each in {**facts, "steps": trainer.steps, "tokens": trainer.tokens}.items()}

    def _status(self) -> Status:
        parts, verdict = self._parts, self._parts.judge.last
        return Status(
            state=self._state,
            servers=parts.servers.names,
            steps=parts.trainer.steps,
            entries_per_s=self._rate,
            tokens=parts.trainer.tokens,
            loss=self._loss,
            target=parts.servers.targets.newest,
            frozen=parts.trainer.frozen.version,
            checkpoint_in=self._config.checkpoint_every - parts.trainer.steps % self._config.checkpoint_every,
            published=parts.publisher.newest,
            rejected=self._in_vain if self._rejected() else 0,
            active=parts.servers.drafter,
            in_force=parts.servers.drafter,
            candidate=verdict.judged.candidate if verdict else None,
            live=verdict.judged.live if verdict else None,
            surely=verdict.judged.surely if verdict else None,
            judged_by=verdict.judged.requests if verdict else 0,
            candidate_reaches=list(verdict.judged.candidate_reaches) if verdict else [],
            live_reaches=list(verdict.judged.live_reaches) if verdict else [],
            control_dropped=parts.sender.dropped,
            feature_messages=parts.inlet.read,
            connections_cut={"control": parts.sender.link.cut, "features": parts.inlet.cut},
            tokens_received=parts.inbox.received,
            tokens_dropped=dict(parts.inbox.dropped),
            parts_dropped=dict(parts.buffer.dropped),
            buffer_bytes=parts.buffer.nbytes,
            buffer_budget=self._config.buffer_mb << 20,
            slowdown=parts.workers.slowdown,
            workers=parts.workers.status(),
        )
