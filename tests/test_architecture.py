"""Imports only go down the floors: this list is the architecture diagram."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "bonsai_ft"

FLOORS = [
    {"resources", "config"},
    {"compose"},
    {"format"},
    {"quantize"},
    {"ops"},
    {"model"},
    {"adapter"},
    {"data"},
    {"train"},
    {"decode"},
    {"generate"},
    {"evaluate", "chat", "inspect", "base_cache", "api"},
    {"finetune"},
    {"bench"},
    {"cli"},
]
HEIGHT = {name: level for level, names in enumerate(FLOORS) for name in names}
# The package's front door only points at public names.
FRONT_DOOR = "__init__"


def imported_parts(path):
    """Second components of every bonsai_ft import outside TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bonsai_ft"):
            parts = node.module.split(".")
            if len(parts) > 1:
                yield parts[1]
            else:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("bonsai_ft."):
                    yield alias.name.split(".")[1]


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.stem != FRONT_DOOR or p.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in HEIGHT, f"{own} has no floor; give it one in FLOORS"
    for part in imported_parts(path):
        if own == "cli":
            continue
        assert part == own or HEIGHT[part] < HEIGHT[own], f"{own} imports {part} from above"


def test_only_the_adapter_floor_knows_peft():
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] == "adapter":
            continue
        names = [
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        ]
        assert not any(name.split(".")[0] == "peft" for name in names), path


def test_resource_folders_are_not_packages():
    # an __init__.py in kernels/ would shadow a library of that name
    for folder in ("kernels", "configs", "recipes"):
        assert not list((PACKAGE.parent / folder).rglob("__init__.py"))
        assert not (PACKAGE / folder).exists()
