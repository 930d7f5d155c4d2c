"""The house as it stands: how many product files there are and how long, and which import each other in circles.

Read with `ast`; nothing is imported. A circle is a strongly connected component of more than one file: each of them
leads to each other by imports. `from a import b` leads to the module `a.b` where there is one, else to `a`; that
Python runs the `__init__` of every folder on the way is left out.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOMS = ("engine", "parallel", "cluster", "deploy")
SHORT_FILE = 60  # lines; shorter files are counted
LONG_FUNCTION = 50  # lines, from `def` to the last; longer functions are named
# Where an import stands. A circle of the first alone is met when the modules are imported, the others are not.
AT_IMPORT, IN_FUNCTION, FOR_TYPES = "at import", "inside functions", "under TYPE_CHECKING"
GRAPHS = {
    AT_IMPORT: (AT_IMPORT,),
    f"or {IN_FUNCTION}": (AT_IMPORT, IN_FUNCTION),
    f"or {FOR_TYPES}": (AT_IMPORT, IN_FUNCTION, FOR_TYPES),
}
Edges = set[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the product. path: from the root, with slashes."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """Its name in imports."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def folder(self) -> str:
        """The folder that it lies in."""
        return self.path.rpartition("/")[0]


def is_product(path: str) -> bool:
    """Whether a path from the root is a product file: Python, in one of the rooms, and not generated."""
    return path.startswith(tuple(f"{room}/" for room in ROOMS)) and path.endswith(".py") and "_pb2" not in path


def sources(root: Path) -> list[Source]:
    """Return the product files below `root`, sorted by path."""
    paths = sorted(path.relative_to(root).as_posix() for room in ROOMS for path in (root / room).rglob("*.py"))
    return [Source(path, (root / path).read_text(encoding="utf-8")) for path in paths if is_product(path)]


def long_functions(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the name, as `file:Class.function`, and the lines of each function over `LONG_FUNCTION`."""

    def look(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*names, child.name)
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                if lines > LONG_FUNCTION and not isinstance(child, ast.ClassDef):
                    yield f"{source.path}:{'.'.join(inside)}", lines
            yield from look(child, inside)

    yield from look(ast.parse(source.text), ())


def imports(files: Iterable[Source]) -> dict[str, Edges]:
    """Return which file imports which, by path, apart by where the import stands."""
    by_module = {file.module: file for file in files}
    found: dict[str, Edges] = {AT_IMPORT: set(), IN_FUNCTION: set(), FOR_TYPES: set()}
    for file in by_module.values():
        for statement, kind in _statements(ast.parse(file.text), AT_IMPORT):
            for name in _imported(statement, file):
                near = name if name in by_module else name.rpartition(".")[0]
                if near in by_module and near != file.module:
                    found[kind].add((file.path, by_module[near].path))
    return found


def _statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield all imports below `node`, which stands where `kind` says."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, kind
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _statements(child, FOR_TYPES)
        for child in node.orelse:
            yield from _statements(child, kind)
    else:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inside = IN_FUNCTION if is_function and kind == AT_IMPORT else kind
        for child in ast.iter_child_nodes(node):
            yield from _statements(child, inside)


def _imported(statement: ast.Import | ast.ImportFrom, file: Source) -> list[str]:
    """Return the full names that a statement imports; the last part may be no module."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        package = file.folder.split("/")
        base = ".".join([*package[: len(package) - statement.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in statement.names]


def circles(edges: Edges) -> list[list[str]]:
    """Return the circles, the largest first, each sorted."""
    following: dict[str, set[str]] = {}
    for start, end in edges:
        following.setdefault(start, set()).add(end)
    reached = {start: _reached(start, following) for start in following}
    found = {
        tuple(sorted(other for other in ends if start in reached.get(other, ())))
        for start, ends in reached.items()
        if start in ends
    }
    return [list(circle) for circle in sorted(found, key=lambda circle: (-len(circle), circle))]


def _reached(start: str, following: dict[str, set[str]]) -> set[str]:
    """Return all to which `start` leads in one step or more."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = following.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def _circles_by_kind(found: dict[str, Edges]) -> dict[str, list[list[str]]]:
    """Return the circles of each of `GRAPHS`."""
    return {name: circles({pair for kind in kinds for pair in found[kind]}) for name, kinds in GRAPHS.items()}


def _packages(found: dict[str, Edges], room: str) -> dict[str, Any]:
    """Return the circles of a room's folders: with the room itself, whose own files stand as it, and without.

    Each folder stands for the files that lie in it. `pairs`: folders that import each other directly, at import.
    """
    folders: dict[str, Edges] = {}
    for kind, edges in found.items():
        pairs = {(start.rpartition("/")[0], end.rpartition("/")[0]) for start, end in edges}
        folders[kind] = {pair for pair in pairs if pair[0] != pair[1] and all(_is_in(path, room) for path in pair)}
    below = {kind: {pair for pair in edges if room not in pair} for kind, edges in folders.items()}
    mutual = sorted(pair for pair in folders[AT_IMPORT] if pair[0] < pair[1] and pair[::-1] in folders[AT_IMPORT])
    return {"with_the_room": _circles_by_kind(folders), "without_it": _circles_by_kind(below), "pairs": mutual}


def _is_in(folder: str, room: str) -> bool:
    return folder == room or folder.startswith(f"{room}/")


def count_house(root: Path) -> dict[str, Any]:
    """Return all figures of the product files below `root`, by name.

    `file_circles` has the circles of files, `package_circles` those of the folders of engine and of cluster.
    """
    files = sources(root)
    lines = {file.path: len(file.text.splitlines()) for file in files}
    generated = [path for room in ROOMS for path in (root / room).rglob("*_pb2*.py")]
    found = imports(files)
    return {
        "files": len(files),
        "generated_files": len(generated),
        "lines": sum(lines.values()),
        "files_by_room": dict(Counter(path.split("/")[0] for path in lines)),
        "lines_by_room": {room: sum(n for path, n in lines.items() if path.startswith(f"{room}/")) for room in ROOMS},
        "files_under_60_lines": sum(n < SHORT_FILE for n in lines.values()),
        "long_functions": dict(pair for file in files for pair in long_functions(file)),
        "files_by_folder": dict(Counter(file.folder for file in files)),
        "imports": {kind: len(edges) for kind, edges in found.items()},
        "file_circles": _circles_by_kind(found),
        "package_circles": {room: _packages(found, room) for room in ("engine", "cluster")},
    }
