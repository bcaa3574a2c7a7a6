"""Recipes: functions that return a `Run`. One may have a parameter `world: int = 1`, the number of ranks
that are asked for, to place modules.

Bundled recipes are named after their function, with `-` for `_`; user recipes are `path/to/file.py:function`.
There is no registry: every public function annotated `-> Run` is a recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from braid import architecture, config
from braid.config import Run
from braid.errors import ConfigError
from braid.validators import nearest

Recipe = Callable[..., Run]


def bundled() -> dict[str, Recipe]:
    """All bundled recipes by name."""
    found: dict[str, Recipe] = {}
    for module in pkgutil.iter_modules(__path__):
        functions = _recipes_in(importlib.import_module(f"{__name__}.{module.name}"))
        found |= {name.replace("_", "-"): function for name, function in functions.items()}
    return dict(sorted(found.items()))


def load(name: str, world: int = 1) -> Run:
    """The run of a bundled recipe, or of `path/to/file.py:function`, for so many ranks."""
    if ".py" in name:
        return _call(_from_file(name), name, world)
    recipes = bundled()
    if name not in recipes:
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, recipes)}\n"
            f"bundled: {', '.join(recipes)}; your own: path/to/file.py:function, run.json or run.yaml"
        )
    return _call(recipes[name], name, world)


def summary(recipe: Recipe) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(recipe) or "").partition("\n")[0]


def _recipes_in(module: types.ModuleType) -> dict[str, Recipe]:
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.get_annotations(function).get("return") in (Run, "Run", "config.Run")
    }


def _from_file(name: str) -> Recipe:
    path, _, function = name.rpartition(":") if ":" in name else (name, "", "")
    if not Path(path).is_file():
        raise ConfigError(f"there is no recipe file {path!r}: give path/to/file.py:function")
    spec = importlib.util.spec_from_file_location("braid_recipe_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"recipe file {path} cannot be loaded: {_explain(error)}") from error
    recipes = _recipes_in(module)
    if function in recipes:
        return recipes[function]
    if inspect.isfunction(getattr(module, function, None)):
        raise ConfigError(f"{function} in {path} is not a recipe: annotate it as `def {function}() -> Run:`")
    names = ", ".join(recipes) or "none (a recipe is a function annotated `-> Run`)"
    raise ConfigError(
        f"{path} has no recipe {function!r}{nearest(function, recipes)}\nits recipes: {names}"
        if function
        else f"{path} needs a function name: give {path}:function\nits recipes: {names}"
    )


def _call(recipe: Recipe, name: str, world: int) -> Run:
    try:
        run = recipe(world=world) if "world" in inspect.signature(recipe).parameters else recipe()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"recipe {name} failed: {_explain(error)}") from error
    if not isinstance(run, Run):
        raise ConfigError(f"recipe {name} returned {type(run).__name__}: it must return a Run")
    return run


def _explain(error: BaseException) -> str:
    """Line and message of an error in a user's recipe; for a misspelt field, the nearest name."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    text = f"line {frames[-1].lineno}: {type(error).__name__}: {error}"
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match:
        kind = getattr(config, match[1], None) or getattr(architecture, match[1], None)
        if kind is not None:
            text += nearest(match[2], inspect.signature(kind).parameters)
    return text
