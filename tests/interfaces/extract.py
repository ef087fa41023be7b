"""Writes the table of what one vLLM release has under each name in `vllm_mars.engine.interfaces`.

    python tests/interfaces/extract.py WHEEL_OR_DIRECTORY --output tests/interfaces/vllm-0.33.0.json

The sources are parsed, never imported, so any release can be read on any machine. The table holds
names only: what a symbol is, and its parameters' names and whether they have defaults.
"""

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllm_mars.engine.compat import Symbol, touches
from vllm_mars.engine.interfaces import INTERFACES, Touch


class Release:
    """The Python sources of one vLLM.

    Args:
        root: a wheel, or the directory that holds the package `vllm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = zipfile.Path(root) if root.is_file() else root
        self._parsed: dict[str, ast.Module | None] = {}

    def symbol(self, module: str, name: str, touch: Touch) -> Symbol | None:
        """What the release has under a name, in the words of `engine.compat.installed_symbol`."""
        first, _, member = name.partition(".")
        found = self._lookup(module, first)
        if found is None:
            return Symbol("module") if self._parse(f"{module}.{first}") else None
        module, node = found
        if not member:
            return self._describe(module, node, touch, owner=None)
        if not isinstance(node, ast.ClassDef):
            return None
        found = self._member(module, node, member)
        return found and self._describe(*found, touch, owner=node)

    def _parse(self, module: str) -> ast.Module | None:
        if module not in self._parsed:
            path = module.replace(".", "/")
            files = [self.root / f"{path}/__init__.py", self.root / f"{path}.py"]
            source = next((file for file in files if file.is_file()), None)
            self._parsed[module] = source and ast.parse(source.read_text(encoding="utf-8"))
        return self._parsed[module]

    def _is_package(self, module: str) -> bool:
        return (self.root / module.replace(".", "/") / "__init__.py").is_file()

    def _lookup(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module in which a name is defined, re-exports followed, and its definition."""
        tree = self._parse(module)
        for node in _statements(tree.body) if tree else ():
            if name in _bound_names(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or name == (alias.asname or alias.name):
                        original = name if alias.name == "*" else alias.name
                        found = self._lookup(self._source(module, node), original)
                        if found:
                            return found
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        up = node.level - 1 if self._is_package(module) else node.level
        return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        """A member's definition, in the class or its bases; attributes set on self count."""
        for node in owner.body:
            if name in _bound_names(node):
                return module, node
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__"):
                for part in ast.walk(node):
                    if (
                        isinstance(part, ast.Attribute)
                        and isinstance(part.ctx, ast.Store)
                        and part.attr == name
                        and ast.unparse(part.value) == "self"
                    ):
                        return module, part
        for base in owner.bases:
            found = self._lookup(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                inherited = self._member(found[0], found[1], name)
                if inherited:
                    return inherited
        return None

    def _describe(
        self, module: str, node: ast.AST, touch: Touch, owner: ast.ClassDef | None
    ) -> Symbol:
        if isinstance(node, ast.ClassDef):
            wanted = touch.use != "exists"
            return Symbol("class", self._constructor(module, node) if wanted else "")
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
        is_called = (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and "property" not in decorators
        )
        if not is_called or touch.use == "exists":
            return Symbol("attribute")
        skipped = 1 if owner and "staticmethod" not in decorators else 0
        return Symbol("method" if owner else "function", _parameters(node.args, skipped))

    def _constructor(self, module: str, node: ast.ClassDef) -> str:
        found = self._member(module, node, "__init__")
        if found and isinstance(found[1], ast.FunctionDef):
            return _parameters(found[1].args, skipped=1)
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        return ", ".join(ast.unparse(f.target) + ("=" if f.value else "") for f in fields)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
            yield from _statements(node.orelse)


def _bound_names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _parameters(arguments: ast.arguments, skipped: int) -> str:
    """A function's parameters in the notation of `vllm_mars.engine.compat.Symbol`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    names = [a.arg + ("=" if i >= required else "") for i, a in enumerate(positional)][skipped:]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg + ("=" if default else ""))
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return ", ".join(names)


def table(root: Path) -> dict[str, dict[str, str]]:
    """The table of one release: "module:name" -> fields of `Symbol`; what is missing is absent."""
    release = Release(root)
    symbols = {
        f"{module}:{name}": release.symbol(module, name, touch)
        for group in INTERFACES
        for module, name, touch in touches(group)
    }
    return {
        key: {field: value for field, value in symbol._asdict().items() if value}
        for key, symbol in sorted(symbols.items())
        if symbol
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Table of vLLM's interfaces that vllm-mars uses.")
    parser.add_argument("release", type=Path, help="a wheel, or the directory that holds vllm/")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    given = parser.parse_args()
    # One symbol a line, so that two releases can be compared with diff.
    rows = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in table(given.release).items()]
    given.output.write_text("{\n" + ",\n".join(rows) + "\n}\n")
