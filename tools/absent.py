"""Modules that vLLM and FlashInfer import at the start and their samplers never use: empty ones, where they are not installed.

tools/get_peers.sh puts this beside its copies of the two, which import it first. What a name is asked for is a class that takes
whatever is done with classes at import: to call it, to derive from it, to write it in an annotation or to decorate with it.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

SERVING = {"aiohttp", "fastapi", "openai", "openai_harmony", "prometheus_client", "requests", "urllib3", "uvloop", "zmq"}
REQUESTS = {"PIL", "cbor2", "cloudpickle", "msgspec", "pybase64"}
GRAMMARS = {"llguidance", "partial_json_parser", "xgrammar"}
ABSENT = SERVING | REQUESTS | GRAMMARS | {"cachetools", "cpuinfo", "psutil"}


class Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=Named):
    def __init__(self, *_, **__):
        pass

    def __init_subclass__(cls, **_):
        pass

    def __class_getitem__(cls, _):
        return cls

    def __call__(self, function=None, *_, **__):
        return function

    @classmethod
    def __get_pydantic_core_schema__(cls, *_):
        from pydantic_core.core_schema import any_schema

        return any_schema()


class Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder, is_package=True) if name.split(".")[0] in ABSENT else None

    @staticmethod
    def create_module(spec):
        return Module(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(Finder)  # the last: what is installed comes first
