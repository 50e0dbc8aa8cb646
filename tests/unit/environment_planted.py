"""Packages that are planted for the scan of readers, shaped like the real ones: a registry of descriptors as SGLang's,
a dict of lambdas as vLLM's. Nothing here is imported: it is source to be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.environment.readers import Package, installed_package

DESCRIPTORS = """
import os


class EnvField:
    def __init__(self, default):
        self.default = default

    def __set_name__(self, owner, name):
        self.name = name

    def get(self):
        value = os.getenv(self.name)
        return self.default if value is None else self.parse(value)

    def set(self, value):
        os.environ[self.name] = str(value)

    def is_set(self):
        return self.name in os.environ


class EnvBool(EnvField):
    def parse(self, value):
        return value.lower() in ("true", "1", "yes")


class EnvStr(EnvField):
    def parse(self, value):
        return value


class _Fallback:
    def __init__(self, default, deprecated_name):
        super().__init__(default)
        self.deprecated_name = deprecated_name

    def get(self):
        if os.getenv(self.name) is None and os.getenv(self.deprecated_name) is not None:
            os.environ[self.name] = os.getenv(self.deprecated_name)
        return super().get()


class EnvBoolWithAlias(_Fallback, EnvBool):
    pass

"""

LAMBDAS = """
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    VLLM_CACHE_ROOT: str = ""
    VLLM_UNUSED: bool = False


def env_with_choices(env_name, default, choices):
    def _get():
        value = os.getenv(env_name)
        return default if value is None else value

    return _get


environment_variables = {
    "VLLM_CACHE_ROOT": lambda: os.getenv("VLLM_CACHE_ROOT", os.getenv("XDG_CACHE_HOME", "~/.cache")),
    "VLLM_USED": lambda: bool(int(os.getenv("VLLM_USED", "0"))),
    "VLLM_UNUSED": lambda: bool(int(os.getenv("VLLM_UNUSED", "0"))),
    "VLLM_CHOICE": env_with_choices("VLLM_CHOICE", "highest", ["highest", "high"]),
    "VLLM_IMPORTED": lambda: os.environ.get("VLLM_IMPORTED"),
    "VLLM_BY_NAME": lambda: os.environ.get("VLLM_BY_NAME"),
    "VLLM_OF_UNUSED": lambda: os.getenv("OTHER_OF_UNUSED"),
}


def __getattr__(name):
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(name)


def is_set(name):
    return name in os.environ


def validate_environ():
    for env in os.environ:
        if env.startswith("VLLM_") and env not in environment_variables:
            print("Unknown environment variable detected:", env)
"""


def plant(folder: Path, name: str, files: Mapping[str, str], version: str = "1.0") -> Package:
    """A package of these files (paths below it → source), with metadata beside it."""
    root = folder / name
    for path, text in {"__init__.py": "", **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (folder / f"{name}-{version}.dist-info").mkdir(exist_ok=True)
    package = installed_package(name, [str(folder)])
    assert package is not None
    return package
