"""The catalogue of recipes: functions that return a whole ``RunConfig``, found by name.

A recipe is a function in any module of this package, marked with its name::

    @recipe("quickstart")
    def quickstart() -> RunConfig: ...

Adding a module adds its recipes; there is no list to keep.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.load import ResolvedConfig, load_run_config
from lockstep.config.schema import RunConfig

Recipe = Callable[[], RunConfig]

_recipes: dict[str, Recipe] = {}


def recipe(name: str) -> Callable[[Recipe], Recipe]:
    """Register the decorated function as the recipe ``name``. Raises ``ValueError`` when the name is taken."""

    def register(function: Recipe) -> Recipe:
        taken = _recipes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"two recipes are named {name!r}: {taken.__module__} and {function.__module__}")
        _recipes[name] = function
        return function

    return register


def recipe_names() -> list[str]:
    """All recipes' names, sorted."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return sorted(_recipes)


def find_recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises ``ConfigError`` for an unknown name, with the nearest known one, and for
    a recipe that builds no valid configuration."""
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        way_out = f'did you mean "{near[0]}"?' if near else "name a recipe, or a file that ends in .toml"
        message = f'there is no recipe "{name}"'
        raise ConfigError(f"recipe {name}", [Violation("", message, way_out, allowed=", ".join(names))])
    try:
        return _recipes[name]()
    except ValidationError as error:
        problem = Violation("", f"the recipe builds no valid configuration: {error}", "correct the recipe")
        raise ConfigError(f"recipe {name}", [problem]) from error


def load_recipe(name_or_file: str, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """``load_run_config`` with this catalogue: a recipe's name or a TOML file, with ``--set`` overrides."""
    return load_run_config(name_or_file, overrides, find_recipe=find_recipe)
