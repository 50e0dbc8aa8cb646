"""The catalogue of recipes: functions that return a whole ``RunConfig``, found by name.

A recipe is a function in any module of this package, marked with its name::

    @recipe("quickstart")
    def quickstart() -> RunConfig: ...

Adding a module adds its recipes; there is no list to keep. What differs by hardware, and named choices, are overlays
and variants (``overlays.py``); a recipe that is another one with a few keys changed is ``derived`` from it.
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
from lockstep.config.tree import Change
from lockstep.recipes.overlays import ChangesFunction, apply, changes_for, set_base, set_default_hardware

Recipe = Callable[[], RunConfig]

_recipes: dict[str, Recipe] = {}


def recipe(name: str, *, hardware: str | None = None) -> Callable[[Recipe], Recipe]:
    """Register the decorated function as the recipe ``name``; ``hardware`` is the kind that it is for where none is
    named (None: the machine that the run is on). Raises ``ValueError`` when the name is taken."""

    def register(function: Recipe) -> Recipe:
        taken = _recipes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"two recipes are named {name!r}: {taken.__module__} and {function.__module__}")
        _recipes[name] = function
        if hardware is not None:
            set_default_hardware(name, hardware)
        return function

    return register


def derived(name: str, *, base: str, hardware: str | None = None) -> Callable[[ChangesFunction], ChangesFunction]:
    """Register the recipe ``name`` as ``base`` with the changes that the decorated function returns."""

    def register(function: ChangesFunction) -> ChangesFunction:
        def made() -> RunConfig:
            return apply(_recipes[base](), {"name": (name, "its own"), **function()})

        made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
        recipe(name, hardware=hardware)(made)
        set_base(name, base)
        return function

    return register


def recipe_names() -> list[str]:
    """All recipes' names, sorted."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return sorted(_recipes)


def find_recipe(name: str) -> RunConfig:
    """The configuration of a recipe, without overlay. Raises ``ConfigError`` for an unknown name, with the nearest
    known one, and for a recipe that builds no valid configuration."""
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


def load_recipe(
    name_or_file: str,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    nodes: int | None = None,
    variants: Sequence[str] = (),
    unverified: bool = False,
) -> ResolvedConfig:
    """``load_run_config`` with this catalogue: a recipe's name or a TOML file, with ``--set`` overrides.

    ``hardware`` chooses the overlay (None: what the file says, or the recipe's own), ``nodes`` among its layouts.
    ``unverified``: a layout without evidence may run. Raises ``ConfigError`` with everything that is wrong.
    """
    options = [
        Change(key, value, origin)
        for key, value, origin in (
            ("cluster.hardware", hardware, "--hardware"),
            ("cluster.nodes", nodes, "--nodes"),
            ("cluster.unverified", unverified or None, "--unverified"),
        )
        if value is not None
    ]
    resolved = load_run_config(
        name_or_file,
        overrides,
        find_recipe=find_recipe,
        changes_of=lambda name, above: changes_for(name, above, variants),
        options=options,
    )
    refuse_unknown_names(resolved.config, name_or_file)
    return resolved


def refuse_unknown_names(config: RunConfig, subject: str) -> None:
    """Raises ``ConfigError`` for hardware or a model that is named and is in no catalogue."""
    from lockstep.topology.catalogue import hardware, model_shape

    problems: list[Violation] = []
    for key, name, look in (
        ("cluster.hardware", config.cluster.hardware, hardware),
        *(
            (f"{role}.catalogue", getattr(source, "catalogue", None), model_shape)
            for role, source in (("model", config.model), ("reference", config.reference), ("teacher", config.teacher))
        ),
    ):
        if name is None:
            continue
        try:
            look(name)
        except ConfigError as error:
            found = error.violations[0]
            problems.append(Violation(key, found.message, found.way_out, allowed=found.allowed))
    if problems:
        raise ConfigError(f"configuration of {subject}", problems)
