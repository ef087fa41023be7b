"""Who imports whom: the sources against the table of the architecture in CONTRIBUTING.md."""

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
    """File of each module."""
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def statements(node):
    """All that runs: imports inside functions, too, but none that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from statements(child)


def imports():
    """The modules of ours that each module imports."""
    paths = dict(modules())
    found = {name: set() for name in paths}
    for name, path in paths.items():
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: imports name their package"
                own = [f"{node.module}.{alias.name}" for alias in node.names]
                candidates = [full if full in paths else node.module for full in own]
            else:
                continue
            found[name].update(paths.keys() & set(candidates))
    return found


def part(module):
    package, *rest = module.split(".")
    return package if package == "benchmarks" else (rest or ["__init__"])[0]


def architecture():
    """What each part may import, from the top to the bottom of the table."""
    rows = re.findall(r"^\| `(\w+)/?` \|.*\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows}


def test_modules_import_in_no_circle():
    graphlib.TopologicalSorter(imports()).prepare()


def test_parts_import_what_the_table_allows():
    allowed = architecture()
    for module, others in imports().items():
        for other in others:
            assert part(other) in allowed[part(module)] | {part(module)}, f"{module}: {other}"


def test_no_part_imports_a_higher_one():
    """No circle of parts either, and the laboratory stays outside of the product."""
    allowed = architecture()
    assert allowed.keys() == {part(module) for module in imports()}
    order = list(allowed)
    for name, others in allowed.items():
        assert others <= set(order[order.index(name) + 1 :]), name
    product = allowed.keys() - LABORATORY - {"cli"}
    assert not any(LABORATORY & allowed[name] for name in product)


# What is handed to vLLM, is made of its classes or calls its kernels.
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
    """So options, definitions and the laboratory can be read and used without an engine."""
    names = [
        name
        for name, _ in modules()
        if name.startswith("vllm_mars") and not any(own in name for own in NEEDS_VLLM)
    ]
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], check=True)
