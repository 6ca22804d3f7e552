"""Who may import whom, and what importing costs: the layers of docs/design.md, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "blockmgr"

# Each layer may import those before it, and modules of its own that stand left of it.
ORDER = [
    "errors", "answers", "counters", "tokens", "namespace", "pool", "forecast", "eviction", "tree", "tables", "fences",
    "sequence", "audit", "explain", "publication", "growth", "admission", "holds", "snapshot", "manager",
    "names", "events", "metrics", "windows", "prefixes", "transfers", "tiers",
]  # fmt: skip
# Third-party packages each import package may use at import time anywhere.
ALLOWED = {
    "blockmgr": {"numpy", "xxhash", "sortedcontainers"},
    "blockmgr_kernels": {"numpy", "torch", "triton", "numba", "llvmlite", "blockmgr_kernels"},
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports at run time, as written; relative ones start with a dot."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level and node.module is None:
                found |= {"." + alias.name for alias in node.names}
            else:
                found.add("." * node.level + (node.module or "").split(".")[0])
    return found


def test_the_core_imports_one_way():
    modules = {path.stem: path for path in CORE.glob("*.py") if path.stem != "__init__"}
    assert set(modules) <= set(ORDER), f"say where these stand: {set(modules) - set(ORDER)}"
    for name, path in modules.items():
        for imported in imports(path):
            if imported.startswith("."):
                assert ORDER.index(imported[1:]) < ORDER.index(name), f"{name} imports {imported[1:]}"


@pytest.mark.parametrize(
    ("package", "folder"), [("blockmgr", "blockmgr"), ("blockmgr_kernels", "kernels/blockmgr_kernels")]
)
def test_packages_import_only_what_they_may(package, folder):
    for path in (ROOT / folder).glob("**/*.py"):
        outside = {name for name in imports(path) if not name.startswith(".") and name not in sys.stdlib_module_names}
        assert outside <= ALLOWED[package], f"{path.name} imports {outside - ALLOWED[package]}"


def test_importing_the_core_brings_no_torch():
    code = "import sys, blockmgr, blockmgr.events, blockmgr.metrics, blockmgr.tiers, blockmgr.windows\n"
    code += (
        "print([name for name in ('torch', 'triton', 'numba', 'transformers', 'hypothesis') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_only_the_facade_is_long():
    """One idea a module. The manager is the public surface: most of its lines are docstrings."""
    for path in [*CORE.glob("*.py"), *ROOT.glob("kernels/*/*.py"), *ROOT.glob("integration/*/**/*.py")]:
        lines = len(path.read_text().splitlines())
        assert lines <= (640 if path.stem in ("manager", "tree") else 480), f"{path.name} has {lines} lines"
