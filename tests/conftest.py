"""Shared by all tests: transformers imports wherever torch does, no property fails because the machine is busy, what
tests start ends by Ctrl-C, no garbage is looked for among imports, and which tests stay together where `make test` has
two workers."""

import atexit
import functools
import gc
import logging
import signal
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.process import ending

gc.disable()  # until all is imported: see tlt_server.process.importing
atexit.register(ending)
# Each client of httpx would load all certificates anew, for 23 ms, though plain HTTP meets none.
ssl.create_default_context = functools.cache(ssl.create_default_context)
settings.register_profile("tlt", deadline=None, max_examples=40)  # drawn anew in each run
settings.load_profile("tlt")
mend_torchvision()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after pytest's own reordering
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that take long come first, so that no worker waits at the end for another's."""
    kinds = ("server", "slow")
    first: dict[Path, int] = {}
    for item in items:
        kind = next((at for at, name in enumerate(kinds) if item.get_closest_marker(name)), len(kinds))
        first[item.path] = min(kind, first.get(item.path, kind))
    items.sort(key=lambda item: first[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays out of each later search for garbage, pytest's two at its end too. And torch's loggers,
    dozens, reach the root's handlers: to each that does not pytest adds handlers of its own, six times a test."""
    gc.freeze()
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """SGLang's parser of flags gives the root logger one handler, of a stderr that ends with the test."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    try:
        return (yield)
    finally:
        root.handlers[:] = handlers
        if root.level != level:  # it looks through thousands of loggers
            root.setLevel(level)


TOGETHER = {Path("tests/fork"), Path("clients/tlt_verl/tests/server")}
"""Folders of which one worker has all tests: they share a build, or a cluster."""
SHARING = (
    "lossless off one_sample penalties arms aborts features rollout_limits versions published metrics eras",
    "swap target_updates weights_checker",
    "processes seeds weight_processes control_calls whole_targets trainer_steps",
    "vllm_rollouts vllm_transfer trainers",
)
"""Files of tests/server of which one worker has all tests, too: each would start the same servers again."""
GROUPS = {Path("tests/server", f"test_{name}.py"): names for names in SHARING for name in names.split()}


@pytest.hookimpl(optionalhook=True)  # of xdist, which a run without workers needs not
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file, or of one such folder, are one worker's. Groups of xdist's own are none with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            return GROUPS.get(file) or str(file.parent if file.parent in TOGETHER else file)

    return ByPlace(config, log)
