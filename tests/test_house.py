"""The house: which way dependencies point, how long things get, and a wheel that works alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "path_attention"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PARTS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}

# What each part may import of the others. Everything may use `results`, which uses nothing.
OPS = {"ops"}
NN = OPS | {"nn"}
MODELS = NN | {"models"}
TRAINING = MODELS | {"training"}
CONVERSION = TRAINING | {"tasks", "evaluation", "analysis", "conversion"}
ALLOWED = {
    "__init__": OPS,
    "ops": OPS,
    "nn": NN,
    "models": MODELS,
    "training": TRAINING,
    "tasks": TRAINING | {"tasks"},
    "evaluation": TRAINING | {"evaluation"},
    "analysis": TRAINING | {"tasks", "analysis"},
    "conversion": CONVERSION,
    "recipes": CONVERSION | {"recipes"},
    "serving": MODELS | {"serving"},
    "benchmarks": TRAINING | {"conversion", "serving", "benchmarks"},
    "results": set(),
    "cli": CONVERSION | {"recipes", "serving", "benchmarks"},
    "__main__": {"cli"},
}


def part_of(module: str) -> str | None:
    """The part that "path_attention.nn.attention" belongs to; None for other packages."""
    names = module.split(".")
    if names[0] != "path_attention":
        return None
    return names[1] if set(names[1:2]) & PARTS else "__init__"


def imported(source: str, module: str) -> set[str]:
    """The parts that a source imports, inside functions too, and by `import_module("…")`."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {part_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(module.split(".")[: -node.level]) if node.level else ""
            base = ".".join(filter(None, [above, node.module or ""]))
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= (
                {part_of(name) for name in names} if base == "path_attention" else {part_of(base)}
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {part_of(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return {part for part in found if part is not None}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_dependencies_point_one_way(path):
    module = module_of(path)
    part = module.split(".")[1]
    assert part in ALLOWED, f"{part}: say in this test what it may import"
    # The root package gives the operator's names to anyone; a part below it may not ask for them.
    allowed = ALLOWED[part] | {part, "results"} | ({"__init__"} if part not in OPS else set())
    wrong = imported(path.read_text(encoding="utf-8"), module) - allowed
    assert not wrong, f"{module} imports {sorted(wrong)}; {part} may import {sorted(allowed)}"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import path_attention.nn.attention", {"nn"}),
        ("from path_attention import Packing, path_attention", {"__init__"}),
        ("from path_attention import models", {"models"}),
        ("def f():\n    from path_attention.training.corpus import TokenCorpus", {"training"}),
        ("from ..nn import attention", {"nn"}),
        ("from .path import path_attention", {"ops"}),
        ("importlib.import_module('path_attention.cli')", {"cli"}),
        ("import torch, transformers", set()),
    ],
)
def test_the_layering_test_sees_every_kind_of_import(source, parts):
    assert imported(source, "path_attention.ops.x") == parts


def test_importing_the_package_loads_torch_alone():
    heavy = ("transformers", "triton", "tokenizers", "datasets", "matplotlib", "tyro", "rich")
    code = (
        "import sys, torch; before = set(sys.modules); import path_attention; "
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_files_and_functions_stay_short():
    long = []
    for path in SOURCES + sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 500:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines, at most 500")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                on_device = any(".jit" in ast.unparse(x) for x in node.decorator_list)
                limit = 120 if on_device else 60
                first = node.body[0]
                described = ast.get_docstring(node) is not None
                lines = node.end_lineno - node.lineno + 1
                lines -= first.end_lineno - first.lineno + 1 if described else 0
                if lines > limit:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    long.append(f"{where} {node.name}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_modules_open_with_a_docstring():
    bare = [
        module_of(path)
        for path in SOURCES
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not bare


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_licence_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"path_attention"}
    inside = {name for name in names if name.endswith(".py")}
    assert inside == {str(path.relative_to(ROOT)) for path in SOURCES}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    page = PACKAGE / "serving" / "page"
    assert {str(path.relative_to(ROOT)) for path in page.iterdir()} <= set(names)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, symlinks=os.name != "nt")
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # Dependencies come from this environment: a path in a .pth brings its packages, and not this
    # checkout, which an editable install reaches by a .pth of its own that is not followed here.
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    code = (
        "import torch, path_attention as p; x = torch.ones(1, 3, 2, 4); "
        "print(p.__file__); print(p.path_attention(x, x, x).shape)"
    )
    where, shape = run(str(python), "-c", code).splitlines()
    assert Path(where).is_relative_to(home)
    assert shape == "torch.Size([1, 3, 2, 4])"
    assert "evaluate perplexity" in run(str(home / "bin" / "path-attention"), "--help")


def test_test_files_have_names_of_their_own():
    """pytest takes two files of one name, in folders that are no packages, for one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
