"""From our config and the user's flags to a running SGLang server."""

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tlt_server import demo
from tlt_server.config import AUTO, MTP, NONE, DrafterKind, ServerConfig, Trainer, drafter_cache, widest
from tlt_server.errors import ConfigError
from tlt_server.keys import MASK, Keys, password, require_private
from tlt_server.preflight import (
    check_experts,
    check_exposure,
    check_models,
    check_named_port,
    check_port,
    check_threads,
    drafter_algorithm,
    read_model_config,
)
from tlt_server.process import ending, importing
from tlt_server.support import drafts_by_own_head, require_supported
from tlt_server.wire.messages import ModelIdentity

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# What SGLang's own defaults get wrong on a machine without a GPU. float32: a CPU gains no speed from bfloat16, and
# greedy output is then reproducible token for token. The pool of 32768 tokens bounds memory, of which SGLang would
# otherwise take a share of all there is. sleep-on-idle: a server with nothing to do would poll on a core all the time.
CPU_FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--dtype": "float32",
    "--mem-fraction-static": "0.2",
    "--max-total-tokens": "32768",
    "--max-running-requests": "32",
    "--skip-server-warmup": None,
    "--sleep-on-idle": None,
}
# One thread a scheduler: with torch's default, busy-polling processes fight over the cores and run ten times slower.
# Without TORCHDYNAMO_DISABLE the first request waits for a C++ compiler. NATIVE_MOVE: by tensors, not by addresses.
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
# flashinfer's own 384 MB are too few for the graph that verifies 4 tokens of each of 256 requests.
GPU_ENVIRONMENT = {"SGLANG_FLASHINFER_WORKSPACE_SIZE": str(2 << 30)}
# Ranks of one machine meet on its loopback. Not NCCL's: a trainer's group may reach over several machines.
GLOO_ON_ONE_MACHINE = ("GLOO_SOCKET_IFNAME", "lo")
# The link to a drafter trainer asks these ten times a second, and would fill the log.
QUIETLY = ["--uvicorn-access-log-exclude-prefixes", "/tlt/v1/events", "/v1/loads"]


def compose(config: ServerConfig, argv: Sequence[str], *, gpu: bool) -> list[str]:
    """SGLang's argv: the user's flags unchanged, then ours for what they left open. `--drafter auto` makes one here.

    Raises ConfigError: the drafter is not one that SGLang loads, or none can be made; or the CPU is asked for where a
        GPU is in sight.
    """
    if gpu and "cpu" in _values(argv, "--device"):
        raise ConfigError("--device cpu beside a GPU: hide it from the server, with CUDA_VISIBLE_DEVICES= in front")
    added: dict[str, str | None] = {"--enable-metrics": None}
    drafter = config.drafter
    if not _given(argv, "--model-path") and not _given(argv, "--model") and not _given(argv, "--config"):
        target, embedded_drafter = demo.default_paths()
        added["--model-path"] = str(target)
        drafter = drafter or str(embedded_drafter)
    own = _given(argv, "--speculative-algorithm")
    if config.drafter in (AUTO, MTP, NONE) and config.speculation and own:
        raise ConfigError(f"--drafter {config.drafter} beside --speculative-algorithm: drop one of the two")
    if drafter and config.speculation and not own:
        if drafter == NONE:
            added["--speculative-algorithm"] = "EAGLE"  # whose verification it is; without a path nothing is loaded
        else:
            folder, algorithm = _drafter(argv, config, drafter, added)
            added |= {"--speculative-algorithm": algorithm, "--speculative-draft-model-path": folder}
        arm = widest(config.to_try)
        added |= {
            "--speculative-num-steps": str(arm.num_steps),
            "--speculative-eagle-topk": str(arm.topk),
            "--speculative-num-draft-tokens": str(arm.num_draft_tokens),
        }
    heads = {"NEXTN", "EAGLE"}.intersection(_values(argv, "--speculative-algorithm"))
    if heads and not _given(argv, "--speculative-draft-model-path"):  # of some targets SGLang wants it said
        added["--speculative-draft-model-path"] = _target(argv, added, "--speculative-algorithm")
    if not gpu:
        added |= CPU_FLAGS
    flags = [[flag] if value is None else [flag, value] for flag, value in added.items() if not _given(argv, flag)]
    if config.trainer and not _given(argv, QUIETLY[0]):
        flags.append(QUIETLY)
    return [*argv, *(word for words in flags for word in words)]


def _drafter(
    argv: Sequence[str], config: ServerConfig, drafter: str, added: Mapping[str, str | None]
) -> tuple[str, str]:
    """The drafter's folder, and SGLang's algorithm for it. One that is made, or named as SGLang names it, is in the
    user's cache; an earlier start may have put it there."""
    if drafter not in (AUTO, MTP):
        from tlt_server.drafter.folder import as_served

        folder = str(as_served(drafter, drafter_cache()))
        return folder, drafter_algorithm(folder)
    target = _target(argv, added, f"--drafter {drafter}")
    if drafter == MTP:
        return target, "EAGLE"
    from tlt_server.drafter.folder import cached

    folder = str(cached(target, config.drafter_kind, drafter_cache()))
    return folder, drafter_algorithm(folder)


def _target(argv: Sequence[str], added: Mapping[str, str | None], why: str) -> str:
    """The target's folder or hub name, of the flags given or added. ConfigError, for `why`: it is not among them."""
    named = [*_targets(argv), added.get("--model-path")]
    if not (found := [name for name in named if name]):
        raise ConfigError(f"{why}: name the target by --model-path, not in SGLang's config file")
    return found[-1]


def _given(argv: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def _values(argv: Sequence[str], flag: str) -> list[str]:
    """The words that a flag is given, in either spelling."""
    apart = [after for word, after in pairwise(argv) if word == flag]
    return apart + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]


def _targets(argv: Sequence[str]) -> list[str]:
    return _values(argv, "--model-path") + _values(argv, "--model")


class _Parser(argparse.ArgumentParser):
    """Upstream's flags with our manners: one line for a mistake, not four hundred of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str]) -> "ServerArgs":
    """SGLang's settings. ConfigError: an unknown flag, a bad value, a model that cannot be found or read."""
    from sglang.srt import server_args
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    if "cpu" in _values(argv, "--device"):  # engine/cpu/alike.py
        server_args.add_deterministic_attention_backend_choices(["torch_native"])
        server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    parser = _Parser(prog="tlt-server serve", allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    if not _given(argv, "--config"):
        _, unknown = parser.parse_known_args(argv)
        if unknown:
            known = [flag for action in parser._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise ConfigError(f"unknown flag {unknown[0]}" + (f": did you mean {near[0]}?" if near else ""))
    for name in _targets(argv):
        if name.startswith(("/", "./", "../")) and not Path(name).exists():
            raise ConfigError(f"model {name}: no such folder. Name another one, or a model on the hub")
    try:
        return prepare_server_args(list(argv))
    except (OSError, ValueError, AssertionError, NotImplementedError) as error:  # how upstream refuses settings
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"SGLang refuses these settings: {reason}") from error


def take_keys(server_args: "ServerArgs", keys: Keys, argv: Sequence[str]) -> Keys:
    """The keys that clients must show, those of SGLang's config file among them; SGLang is left a mask of each. Raises
    ConfigError: a key is said twice, or others may read the config file that it is in."""
    told = Keys(server_args.api_key, server_args.admin_api_key)
    for path in _values(argv, "--config"):
        if any(told):
            require_private(Path(path))
    if (told.api and keys.api) or (told.admin and keys.admin):
        raise ConfigError("a key stands in SGLang's config file and elsewhere: give it once")
    keys = Keys(told.api or keys.api, told.admin or keys.admin)
    masks = {"api_key": MASK if keys.api else None, "admin_api_key": MASK if keys.admin else None}
    server_args.override("tlt-server", **masks)
    if password():
        server_args.override("tlt-server", ssl_keyfile_password=password())
    return keys


def following(
    trainer: Trainer | None, server_args: "ServerArgs", keys: Keys | None = None
) -> AbstractContextManager[Any]:
    """A context in which a server follows its drafter trainer, if it has one. ConfigError: it cannot."""
    if trainer is None:
        return nullcontext()
    if None in (server_args.speculative_algorithm, server_args.speculative_draft_model_path):
        raise ConfigError("--trainer: this server has no drafter that could be exchanged. Give --drafter, or drop it")
    if drafts_by_own_head(server_args):
        raise ConfigError("--trainer: it makes EAGLE drafters, and an MTP head is the target's. Drop one of the two")
    if server_args.nnodes > 1:
        raise ConfigError("--trainer: drafters arrive on one machine, and this server has several. Drop one of the two")
    from transformers import PretrainedConfig

    from tlt_server.link.process import kept, run, settle

    target, _ = PretrainedConfig.get_config_dict(server_args.model_path, revision=server_args.revision)
    settings = settle(
        trainer,
        server_args.url(),
        keys.api if keys else None,
        keys.admin if keys else None,
        ModelIdentity.of(target),
        Path(server_args.speculative_draft_model_path),
    )
    return kept(run, settings)


def keep_drafter(server_args: "ServerArgs") -> None:
    """Lets the drafter come back as it was when released memory is resumed: nobody sends it again."""
    if server_args.enable_memory_saver:
        server_args.override("tlt-server", enable_draft_weights_cpu_backup=True)


def has_gpu() -> bool:
    """Whether this machine has a GPU that this build of torch can use."""
    import torch

    return bool(torch.cuda.is_available())


def _check_drafter(server_args: "ServerArgs") -> None:
    if server_args.speculative_algorithm is None:
        return
    from tlt_server.drafter.capability import require_drafted
    from tlt_server.drafter.mtp import require_head
    from tlt_server.engine.loading.schema import require_as_published

    if own_head := drafts_by_own_head(server_args):
        require_head(server_args.model_path)
    else:
        kind = DrafterKind(server_args.speculative_algorithm.lower())
        require_drafted(read_model_config("target", server_args.model_path), kind, f"target {server_args.model_path}")
    require_as_published(server_args.get_model_config(), own_head)
    check_models(Path(server_args.model_path), Path(server_args.speculative_draft_model_path))


def serve(config: ServerConfig, argv: Sequence[str], keys: Keys, *, insecure: bool) -> None:
    """Runs the rollout server until it is stopped. keys: that clients must show. insecure: others may get in.

    Raises ConfigError: settings, models or port that cannot be used.
    Raises UnsupportedError: a combination of features that would not work.
    """
    if not _given(argv, "--config"):  # which may name others; `prepare` sees them, seconds later
        check_named_port(_values(argv, "--host"), _values(argv, "--port"))
    with importing():
        server_args, link = prepare(config, argv, keys, insecure=insecure)
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints import http_server  # noqa: F401  # run_server's own next import
        from sglang.srt.utils import kill_process_tree

    try:
        with link:
            run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        ending()


def prepare(
    config: ServerConfig, argv: Sequence[str], keys: Keys, *, insecure: bool
) -> "tuple[ServerArgs, AbstractContextManager[Any]]":
    """SGLang's settings, checked, in a process that is ready for them; what makes the server follow its trainer. Raises
    as `serve` does."""
    import torch

    gpu = has_gpu()
    for name, value in (GPU_ENVIRONMENT if gpu else CPU_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    if not gpu:
        check_threads(os.environ["OMP_NUM_THREADS"])
        torch.set_num_threads(1)  # a fork has no others, and would wait for them for ever
    composed = compose(config, argv, gpu=gpu)
    config.to_environment()
    server_args = parse(composed)
    keys = take_keys(server_args, keys, composed)
    check_exposure(server_args, keyed=bool(keys.api), insecure=insecure)
    keys.to_environment()
    if server_args.nnodes == 1:
        os.environ.setdefault(*GLOO_ON_ONE_MACHINE)
    keep_drafter(server_args)
    require_supported(server_args, config.draft_vocab)
    if server_args.enable_return_routed_experts:
        check_experts(server_args.model_path)
    if not config.without_drafter:
        _check_drafter(server_args)
    check_port(server_args.host, server_args.port)
    return server_args, following(config.trainer, server_args, keys)
