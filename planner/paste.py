"""Python source as text: cut out the functions and classes that are used, keep their imports. Pure."""

from __future__ import annotations

import ast
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping


def needed_definitions(frame: str, sources: Iterable[str]) -> list[str]:
    """The text of each function and class that the frame uses, and of those that these use, in the sources' order."""
    bodies: dict[str, str] = {}
    for source in sources:
        bodies.update(definitions(source))
    needed: set[str] = set()
    found = _names_used(frame) & bodies.keys()
    while found:
        needed |= found
        found = set().union(*(_names_used(bodies[name]) for name in found)) & bodies.keys() - needed
    return [body for name, body in bodies.items() if name in needed]


def definitions(source: str) -> dict[str, str]:
    """The text of each function and class of a file, by its name."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def _names_used(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def with_needed_imports(text: str, sources: Iterable[str]) -> str:
    """The frame's imports and those of the sources as one sorted block, without what is not used.

    What a source imports of gradplan is pasted, and not imported.
    """
    used = _names_used(text)
    frame = _imports(text)
    plain: set[str] = set()
    members: defaultdict[str, set[str]] = defaultdict(set)
    for node in itertools.chain(frame, *map(_imports, sources)):
        names = {_as_written(alias) for alias in node.names if _bound(alias) in used}
        if isinstance(node, ast.Import):
            plain |= names
        elif names and not str(node.module).startswith("gradplan"):
            members[str(node.module)] |= names
    lines = text.splitlines()
    before, after = lines[: frame[0].lineno - 1], lines[frame[-1].lineno :]
    return "\n".join([*before, *_import_lines(plain, members), *after]) + "\n"


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _as_written(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [node for node in nodes if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]


def _import_lines(plain: Iterable[str], members: Mapping[str, Iterable[str]]) -> list[str]:
    """The standard library first; ``import`` before ``from``; constants, classes, then functions."""

    def kind(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    lines = {f"import {module}": module for module in sorted(plain)}
    for module in sorted(members):
        lines[f"from {module} import {', '.join(sorted(members[module], key=kind))}"] = module
    standard = [line for line, module in lines.items() if module.partition(".")[0] in sys.stdlib_module_names]
    return [*standard, "", *(line for line in lines if line not in standard)]
