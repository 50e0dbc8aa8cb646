"""The command ``refit check``: which model is meant, the check, the table; exit code as result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import ModelSource, PathModel
from lockstep.model.tiny import tiny_names, tiny_source

DONE, FAILED = 0, 1


def named_model(name: str) -> ModelSource:
    """A folder, a recipe's model, or a tiny random one. Raises ConfigError listing what there is for any other name."""
    if Path(name).expanduser().is_dir():
        return PathModel(path=name)
    from lockstep.recipes import find_recipe, load_recipe, recipe_names

    if name in recipe_names():
        return find_recipe(name).model
    if name.endswith(".toml"):
        return load_recipe(name).config.model
    tiny = tiny_source(name)
    if tiny is None:
        known = ", ".join([*recipe_names(), *(one for one in tiny_names() if one not in recipe_names())])
        problem = Violation("", f'"{name}" is no folder, recipe or tiny model', f"name a folder, or one of: {known}")
        raise ConfigError("refit check", [problem])
    return tiny


def check(name: str, engine: Any, *, as_json: bool, **options: Any) -> int:
    """Run ``check_refit`` on the named model and print its result. Returns 1 if anything failed."""
    source = named_model(name)
    from lockstep.refit.check import as_text, check_refit

    result = check_refit(
        source, engine, name=name, say=lambda text: print(text, file=sys.stderr, flush=True), **options
    )
    print(json.dumps(result.as_dict()) if as_json else as_text(result))
    return DONE if result.ok else FAILED
