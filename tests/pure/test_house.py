"""House rules that no linter knows: where devices are named, what loads torch, how long things are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "isotron").rglob("*.py"))
FUNCTION_LINES = 80
# pickles of a foreign format become inert stand-ins here, in a process that has given up all but reading
CONFINED = ROOT / "isotron" / "hub" / "megatron" / "unpickle.py"
FILE_LINES = 500


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_pure(path: Path) -> bool:
    return bool(re.search(r"\bPURE\b", ast.get_docstring(tree(path)) or ""))


PURE = [path for path in FILES if is_pure(path)]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, lazily too, apart from what only the type checker sees."""
    module = tree(path)
    hidden = {
        node
        for block in ast.walk(module)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(module):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def places(path: Path, nodes: list[ast.AST]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}" for node in nodes]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_lengths(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES
    long = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES
    ]
    assert not places(path, long)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_global_statement_and_no_unsafe_load(path):
    bad: list[ast.AST] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Global):
            bad.append(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            unsafe = {"pickle": ("load", "loads", "Unpickler"), "torch": ("load",), "marshal": ("load", "loads")}
            if node.attr in unsafe.get(node.value.id, ()) and path != CONFINED:
                bad.append(node)
    assert not places(path, bad)


def option_values(module: ast.Module) -> set[ast.AST]:
    """Constants that are a legal value of an option, or a spelling of one: text, not a device."""
    allowed: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "choices":
            allowed |= set(ast.walk(node.value))
        if isinstance(node, ast.AnnAssign) and "ALIASES" in ast.unparse(node.target) and node.value:
            allowed |= set(ast.walk(node.value))
    return allowed


def test_messages_that_count_names_show_the_first_of_them():
    counted = re.compile(r"\{len\((\w+)\)\}.*\bjoin\((?:sorted\()?\1\)")  # see `listed` in errors.py
    assert not [str(path) for path in FILES if counted.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_the_device_module_names_devices(path):
    if path == ROOT / "isotron" / "core" / "device.py" or (ROOT / "isotron" / "config") in path.parents:
        return  # in config/ the word is the text of an option
    module = tree(path)
    allowed = option_values(module)
    bad: list[ast.AST] = []
    for node in ast.walk(module):
        literal = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in allowed
        if literal and re.fullmatch(r"cuda(:\d+)?", node.value):
            bad.append(node)
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            bad.append(node)
    assert not places(path, bad)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_layers_and_models_know_no_ranks(path):
    if path.relative_to(ROOT / "isotron").parts[:2] in (("core", "nn"), ("core", "models")):
        ranks = ("torch.distributed", "isotron.core.mesh", "isotron.core.comm", "isotron.core.parallel")
        assert not [name for name in imports(path) if name.startswith(ranks)]


@pytest.mark.parametrize("path", PURE, ids=module_name)
def test_pure_modules_name_no_torch(path):
    assert not [name for name in imports(path) if name == "torch" or name.startswith("torch.")]


def test_one_place_makes_process_groups():
    """The one that gives them the default group's timeout."""
    made = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("dist.new_group(") for path in FILES}
    assert {path: count for path, count in made.items() if count} == {"isotron/core/mesh.py": 1}


def test_pure_modules_load_without_torch():
    names = [module_name(path) for path in PURE]
    assert "isotron.core.layout" in names and "isotron.core.errors" in names
    script = "import sys, importlib\nsys.modules['torch'] = None\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in names
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_launching_loads_no_torch():
    script = "import sys, isotron.launch; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
