"""Stand-ins for packages that SGLang imports on a GPU and never calls while it serves text.

benchmarks/gpu/bundle.sh puts this file into its bundle as sitecustomize.py, so that Python runs it at start. Each name
in a stand-in is a class that can be made or subclassed, and does nothing.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STOOD_IN = frozenset({"IPython", "soundfile", "deep_gemm"})


class Nothing:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class Empty(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # which makes it a package: its submodules are stand-ins too

    def __getattr__(self, name: str) -> type[Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] in STOOD_IN:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
