"""Does what is installed from a wheel work anywhere, without the checkout beside it?"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import bonsai_ft

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parent.parent
SHIPPED = ("bonsai_ft", "configs", "recipes", "kernels")


def build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a fresh clone has: no build outputs and no empty folders."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in SHIPPED:
        if any(path.is_file() for path in (CHECKOUT / name).rglob("*")):
            shutil.copytree(CHECKOUT / name, copy / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """bin/ of a fresh environment: the wheel, and what bonsai_ft needs, but not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    scripts = folder / "bin"
    command = [sys.executable, "-m", "pip", "-q", "--python", scripts / "python", "install"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # a folder named in a .pth file has its own .pth files ignored, the editable install's too
    (packages / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return scripts


@pytest.fixture
def run(installed, tmp_path):
    """`run("bonsai-ft", ...)` in a folder that has nothing to do with the checkout."""

    def execute(program: str, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            [installed / program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return execute


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_shipped_file_and_nothing_generic_at_its_top(wheel, checkout):
    held = names(wheel)
    about = f"bonsai_ft-{bonsai_ft.__version__}.dist-info"
    assert {name.split("/")[0] for name in held} == {"bonsai_ft", about}
    for name in SHIPPED:
        inside = "bonsai_ft" if name == "bonsai_ft" else f"bonsai_ft/{name}"
        for path in (checkout / name).rglob("*"):
            if path.is_file():
                assert f"{inside}/{path.relative_to(checkout / name).as_posix()}" in held
    assert "bonsai_ft/recipes/data/alpaca_cn.jsonl" in held
    assert "bonsai_ft/configs/train.yaml" in held
    assert not any("__pycache__" in name or "tests" in name for name in held)


def test_the_wheel_built_from_the_source_archive_is_the_same(checkout, wheel, tmp_path):
    archive = build("sdist", checkout, tmp_path / "sdist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert names(again) == names(wheel)


def test_the_installed_package_is_not_the_checkout(run, installed):
    where = run("python", "-c", "import bonsai_ft; print(bonsai_ft.__file__)")
    assert Path(where).is_relative_to(installed.parent)
    found = run(
        "python", "-c", "from bonsai_ft.resources import resource; print(resource('recipes'))"
    )
    assert Path(found).is_relative_to(installed.parent)


def test_the_console_script_helps_and_composes_a_recipe(run):
    assert "quantize" in run("bonsai-ft", "--help")
    assert "name: alpaca_cn" in run("bonsai-ft", "train", "recipe=alpaca_cn", "--cfg", "job")


def test_a_recipe_trains_on_its_own_rows_from_elsewhere(run, tmp_path, tiny_base):
    run(
        "bonsai-ft",
        "train",
        "recipe=alpaca_cn",
        f"model.source={tiny_base('llama')}",
        "hardware=cpu",
        "data.sequence_length=256",
        "data.held_out_fraction=0.01",
        "train.total_steps=1",
        "train.accumulation=1",
        "train.probe_tokens=2",
        "run_dir=run",
    )
    assert (tmp_path / "run" / "adapter.bonsai").is_file()
    assert run("bonsai-ft", "inspect", "run/adapter.bonsai", "--json").startswith("{")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
