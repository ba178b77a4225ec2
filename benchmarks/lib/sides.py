"""The servers of a comparison, side by side: ours with each arm and without, and SGLang as its authors ship it.

All sides of a group stand on one machine at once and are not restarted between measurements. While one is measured the
others are stopped (SIGSTOP): an idle scheduler polls, and would take a core.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from tlt_client.schemas import StrategyUpdate

from benchmarks.lib.servers import Server
from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.launch import GPU_ENVIRONMENT, has_gpu
from tlt_server.preflight import drafter_algorithm, read_config
from tlt_server.process import Running, running_module
from tlt_server.strategy.settings import to_client

GPU_FLAGS = [
    *("--attention-backend", "flashinfer", "--dtype", "bfloat16", "--disable-prefill-cuda-graph"),
    # servers share the card: the tokens decide what each takes, not the share of memory that it finds free
    *("--mem-fraction-static", "0.9"),
]
# Ranks reduce by NCCL alone: SGLang's own kernels want NVLink multicast, which not every host lets a program use.
PLAIN_NCCL = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
# To natural ends: SGLang does not keep room for all to be as long as allowed, nor for one that it is about to let in.
NATURAL_FLAGS = ("--schedule-conservativeness", "0.1")
NATURAL_ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "256"}
# What a server takes beside weights and cache: context, workspace, graphs, logits; measured, rounded up.
OVERHEAD_GB = {
    "gpu": {"plain": 5, "speculation": 8, "further_arm": 1.5},
    "cpu": {"plain": 1.5, "speculation": 1.5, "further_arm": 0},
}
LOG_INTERVAL = 8  # decode steps that the server sums up in one line of its log


@dataclass(frozen=True)
class Side:
    """What is measured at one time: a server, or one of ours with several arms as a strategy decodes with them.

    name: in figures.
    arm: None decodes plainly.
    upstream: SGLang as its authors ship it.
    accept_length: simulated by SGLang, tokens, of chains; None accepts what the target accepts.
    max_batch: it is asked no more requests at once.
    flags: more of SGLang's, or ours.
    arms: several, of ours; sides that name some have one server together, those of history alone another.
    strategy: by which that server then decodes.
    """

    name: str
    arm: Arm | None = None
    upstream: bool = False
    accept_length: float | None = None
    max_batch: int = 256
    flags: tuple[str, ...] = ()
    arms: tuple[Arm, ...] = ()
    strategy: StrategyUpdate | None = None

    @property
    def server(self) -> str:
        """Its server's name."""
        if not self.arms:
            return self.name
        return "undrafted" if self.undrafted else "arms"

    @property
    def undrafted(self) -> bool:
        """Whether its server has arms, and no drafter: history alone drafts."""
        return bool(self.arms) and all(arm.of_history for arm in self.arms)

    @property
    def learns(self) -> bool:
        """Whether what it decodes by depends on what it has decoded."""
        asked = self.strategy
        if asked is None or asked.mode not in ("bandit", "paper"):
            return False
        return asked.buckets is None or any(len(bucket.arms) > 1 for bucket in asked.buckets)

    @property
    def remembers(self) -> bool:
        """Whether its next turn goes on from what it learned: of the published bandit's rewards a server keeps none."""
        return self.learns and self.strategy is not None and self.strategy.mode == "bandit"

    @property
    def drafts(self) -> bool:
        """Whether its steps can give more than one token a request."""
        return self.arm is not None or bool(self.arms and (self.strategy is None or self.strategy.mode != "off"))


def name_of(arm: Arm) -> str:
    """`chain_3`, `tree_5_4_16`, `history_7`."""
    if arm.of_history:
        return f"history_{arm.num_steps}"
    return f"chain_{arm.num_steps}" if arm.topk == 1 else f"tree_{arm.num_steps}_{arm.topk}_{arm.num_draft_tokens}"


@dataclass(frozen=True)
class Site:
    """What all sides have in common.

    upstream: a folder with SGLang as its authors ship it; its sides need one.
    max_tokens: in each server's KV cache.
    natural: responses end where the model ends them, long before the most that they may have.
    """

    target: Path
    drafter: Path
    logs: Path
    batches: Sequence[int]
    max_tokens: int
    upstream: Path | None = None
    context: int | None = None
    flags: Sequence[str] = field(default_factory=list)
    natural: bool = False

    def command(self, side: Side) -> tuple[list[str], list[str], dict[str, str]]:
        """Module, its flags, and environment of a side."""
        flags = [*("--model-path", str(self.target), "--decode-log-interval", str(LOG_INTERVAL)), *self.flags]
        # of 256 running requests SGLang would run 255
        flags += ["--max-total-tokens", str(self.max_tokens), "--max-running-requests", str(max(self.batches) + 16)]
        flags += ["--context-length", str(self.context)] if self.context else []
        environment: dict[str, str] = {}
        if self.natural:
            flags += NATURAL_FLAGS
            environment |= NATURAL_ENVIRONMENT
        if has_gpu():
            graphs = [str(batch) for batch in self.batches if batch <= side.max_batch]
            flags += [*GPU_FLAGS, "--cuda-graph-bs-decode", *graphs]
            environment |= GPU_ENVIRONMENT  # for upstream's too
        if side.arm:
            flags += [
                *("--speculative-algorithm", drafter_algorithm(str(self.drafter))),
                *("--speculative-draft-model-path", str(self.drafter)),
                *("--speculative-num-steps", str(side.arm.num_steps), "--speculative-eagle-topk", str(side.arm.topk)),
                *("--speculative-num-draft-tokens", str(side.arm.num_draft_tokens)),
            ]
        if side.arms:
            flags += ["--drafter", "none" if side.undrafted else str(self.drafter)]
            flags += [word for arm in side.arms for word in ("--arm", str(to_client(arm)))]
        if side.accept_length:
            environment["SGLANG_SIMULATE_ACC_LEN"] = str(side.accept_length)
            # its own drafts: of one token for all, a mixture would run the same few experts
            environment["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
        if side.upstream:
            # in front of ours: what upstream imports is the same, and its compiled kernels are not compiled again
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.upstream), os.getenv("PYTHONPATH"))))
            return ["sglang.launch_server"], [*flags, *side.flags], environment
        plain = [] if side.arm or side.arms else ["--no-speculation"]
        return ["tlt_server", "serve"], [*plain, *flags, *side.flags], environment


@dataclass
class SideServer(Server):
    """A side that answers."""

    log: Path = Path()
    pid: int = 0

    def stop(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)


def on_ranks(count: int) -> tuple[str, ...]:
    """The flags of a server that takes so many GPUs."""
    return ("--tp-size", str(count), *(PLAIN_NCCL if has_gpu() and count > 1 else ()))


def servers_of(sides: Sequence[Side]) -> list[Side]:
    """Of each server the side that is asked most requests at once."""
    return list({side.server: side for side in sorted(sides, key=lambda side: side.max_batch)}.values())


def check_memory(sides: Sequence[Side], site: Site) -> None:
    """Raises ConfigError if these servers would not fit beside each other."""
    needed = sum(
        _weight_gb(site.target) + site.max_tokens * _cache_bytes(site.target) / 1e9
        + _overhead_gb(side, site)
        for side in servers_of(sides)
    )  # fmt: skip
    free = _free_gb()
    if needed > free:
        raise ConfigError(
            f"{len(servers_of(sides))} servers of {site.target} side by side need {needed:.0f} GB, and {free:.0f} "
            "GB are free. Choose a smaller --shape, or end what takes the memory"
        )


def _overhead_gb(side: Side, site: Site) -> float:
    """Beside the target's weights and the cache."""
    known = OVERHEAD_GB["gpu" if has_gpu() else "cpu"]
    arms = len(side.arms) or int(side.arm is not None)
    if not arms:
        return known["plain"]
    drafter = 0.0 if side.undrafted else _weight_gb(site.drafter)
    return known["speculation"] + (arms - 1) * known["further_arm"] + drafter


def _weight_gb(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9


def _cache_bytes(model: Path) -> int:
    """Of one token's keys and values."""
    config = read_config(model)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_layer = 2 * config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    return int(config["num_hidden_layers"] * per_layer * (2 if has_gpu() else 4))


def _free_gb() -> float:
    if has_gpu():
        return float(torch.cuda.mem_get_info()[0]) / 1e9
    return psutil.virtual_memory().available / 1e9


@contextmanager
def side_by_side(sides: Sequence[Side], site: Site) -> Iterator[Mapping[str, SideServer]]:
    """The sides' servers by name, started and stopped: `awake` lets one run.

    On a GPU they start at once, else one after another.

    Raises:
        ConfigError: they would not fit into memory.
        ServerFailed: one did not start.
    """
    check_memory(sides, site)
    sides = servers_of(sides)
    with ExitStack() as stack:

        def start(side: Side) -> SideServer:
            module, flags, environment = site.command(side)
            log = site.logs / f"{side.server}.log"
            began = running_module(module, flags, log, start_timeout=400, environment=environment)
            since = time.monotonic()
            server: Running = stack.enter_context(began)
            found = SideServer(server.url, time.monotonic() - since, log=log, pid=server.pid)
            stack.enter_context(found.http)
            stack.callback(found.go_on)  # a stopped process would not hear that it is to end
            found.stop()
            return found

        with ThreadPoolExecutor(len(sides) if has_gpu() else 1) as pool:
            yield dict(zip((side.server for side in sides), pool.map(start, sides), strict=True))


@contextmanager
def awake(server: SideServer) -> Iterator[SideServer]:
    """A side that runs while the others stand still."""
    server.go_on()
    try:
        yield server
    finally:
        server.stop()
