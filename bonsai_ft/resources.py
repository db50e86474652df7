"""Where are the files that are not Python packages: configs/, recipes/, kernels/ and the cache?

In a wheel the first three lie inside the package, in a checkout beside it.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The file or folder `name` (such as "configs"), from the wheel or the checkout."""
    for root in (PACKAGE, PACKAGE.parent):
        if (path := root / name).exists():
            return path
    raise FileNotFoundError(
        f"{name!r} is neither in {PACKAGE} nor in {PACKAGE.parent}; reinstall bonsai-ft"
    )


def cache_folder(chosen: str | None = None) -> Path:
    """What may be made again lies here: `chosen`, `$BONSAI_FT_CACHE` or `~/.cache/bonsai_ft`."""
    folder = chosen or os.environ.get("BONSAI_FT_CACHE") or "~/.cache/bonsai_ft"
    return Path(folder).expanduser()


def load_recipe(name: str) -> ModuleType:
    """The Python half of a recipe: `recipes/<name>.py`, or a user's own file by path."""
    path = Path(name).expanduser() if name.endswith(".py") else resource("recipes") / f"{name}.py"
    if not path.is_file():
        known = sorted(p.stem for p in resource("recipes").glob("*.py"))
        raise ValueError(
            f"recipe.name={name}: there is no {path}; known recipes: {', '.join(known)}, "
            "or give the path of your own .py file"
        )
    spec = importlib.util.spec_from_file_location(f"bonsai_ft.recipes.{path.stem}", path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError:
        raise
    except Exception as error:
        raise ValueError(
            f"recipe.name={name}: {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    _check_halves(name, module)
    return module


def _check_halves(name: str, module: ModuleType) -> None:
    """ValueError for a recipe whose parts are not what a run can use, before anything is made."""
    probes = getattr(module, "PROBES", [])
    if not isinstance(probes, list) or not all(isinstance(probe, str) for probe in probes):
        raise ValueError(f"recipe.name={name}: PROBES must be a list of questions (strings)")
    if not isinstance(getattr(module, "DATASET", ""), str):
        raise ValueError(f"recipe.name={name}: DATASET must be a path or a hub id (a string)")
    if not callable(getattr(module, "conversation", _check_halves)):
        raise ValueError(f"recipe.name={name}: conversation must be a function of one row")
