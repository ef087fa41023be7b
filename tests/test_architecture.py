"""Imports between parts, against the table of the architecture in CONTRIBUTING.md."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"vllm_mars": "vllm_mars", "kernels": "vllm_mars.kernels", "benchmarks": "benchmarks"}
LABORATORY = {"benchmarks", "lab"}


def modules():
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def statements(node):
    """Yields all statements except those under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from statements(child)


def imports():
    """Returns the project's modules that each module imports."""
    paths = dict(modules())
    imported = {name: set() for name in paths}
    for module, path in paths.items():
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports name their package"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                candidates = [name if name in paths else node.module for name in names]
            else:
                continue
            imported[module].update(paths.keys() & set(candidates))
    return imported


def part(module):
    package, *rest = module.split(".")
    return package if package == "benchmarks" else (rest or ["__init__"])[0]


def architecture():
    """Returns what each part may import, in the order of the table."""
    rows = re.findall(r"^\| `(\w+)/?` \|.*\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows}


def test_modules_have_no_circular_imports():
    graphlib.TopologicalSorter(imports()).prepare()


def test_parts_import_what_the_table_allows():
    allowed = architecture()
    for module, others in imports().items():
        for other in others:
            assert part(other) in allowed[part(module)] | {part(module)}, f"{module}: {other}"


def test_no_part_imports_a_higher_one():
    """So parts have no circular imports, and the product does not import the laboratory."""
    allowed = architecture()
    assert allowed.keys() == {part(module) for module in imports()}
    order = list(allowed)
    for name, others in allowed.items():
        assert others <= set(order[order.index(name) + 1 :]), name
    product = allowed.keys() - LABORATORY - {"cli"}
    assert not any(LABORATORY & allowed[name] for name in product)


# Modules that subclass vLLM's classes or call its kernels.
NEEDS_VLLM = (
    "vllm_mars.worker.",
    "vllm_mars.report.",
    "vllm_mars.ray_serve",
    "kernels.accept.resample",
)
IMPORT_ALL = """
import importlib, sys
sys.modules["vllm"] = None
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_the_rest_imports_without_vllm():
    """So options, definitions and the laboratory work without an engine."""
    names = [
        name
        for name, _ in modules()
        if name.startswith("vllm_mars") and not any(part in name for part in NEEDS_VLLM)
    ]
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], check=True)
