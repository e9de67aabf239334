"""The architecture of the package: folders in import order, frameworks in their own folders, small folders that say what they are."""

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autotune"

ORDER = (
    "errors",
    "units",
    "native",
    "ir",
    "workloads",
    "layout",
    "capture",
    "predict",
    "planners",
    "records",
    "kernels",
    "runtime",
    "measure",
    "study",
    "fleet",
    "report",
    "nightly",
    "api",
    "integrations",
    "cli",
    "testing",
)
"""Modules and folders of the package; each imports only itself and what stands before it."""

DOORS = ("autotune", "autotune.__main__")
"""Entries of the whole: `autotune.TrainStep` waits in the package itself until it is asked for, `__main__` is the command line."""

FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "workloads", "capture", "kernels", "runtime", "measure.worker", "measure.meters", "measure.device", "measure.limits",
        "integrations", "testing.store_contract",
        "cli.doctor",  # the check that torch works here, in a process of its own
    ),
    "optuna": ("study.trials", "study.trial_store", "study.optuna_space", "study.shared_study", "study.priors"),
    "mlflow": ("report.mlflow_log", "report.mlflow_store"),
    "rich": ("cli",),
    "typer": ("cli",),
    "matplotlib": ("report",),
    "jinja2": ("report",),
    "pydantic": ("records", "nightly", "fleet.fleet_file"),
    "cloudpickle": ("workloads",),
    "ray": ("fleet.ray",),
    "transformers": ("workloads.zoo", "integrations.hf"),
    "lightning": ("integrations.lightning",),
    "accelerate": ("integrations.accelerate",),
    "ortools": ("planners.recompute",),
}  # fmt: skip
"""Where each framework may be imported, at whatever depth of a file."""

HEAVY = {
    "torch",
    "ray",
    "optuna",
    "mlflow",
    "pandas",
    "pydantic",
    "transformers",
    "lightning",
    "accelerate",
    "matplotlib",
    "jinja2",
}
"""What `autotune --help` must not wait for."""

LARGEST = 14
"""Modules in a folder, its `__init__` not counted."""

LONGEST = 400
"""Lines of a module."""

UPWARD: Mapping[tuple[str, str], str] = {}
"""(module, what it imports): the reason. May only shrink."""


@dataclass(frozen=True)
class Import:
    """One import of a file."""

    line: int
    name: str
    """Dotted: a module, or a name in it."""
    deferred: bool = False
    """In a function, or for types alone."""


Imports = Mapping[str, tuple[Import, ...]]
"""By module."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, deferred: bool = False) -> Iterator[Import]:
    """Imports of a file in order, at whatever depth."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names):
                yield from (Import(node.lineno, name.name, deferred) for name in names)
            case ast.ImportFrom(str(module), names, 0):
                yield from (Import(node.lineno, f"{module}.{name.name}", deferred) for name in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imported(node, True)
            case ast.If(test) if "TYPE_CHECKING" in ast.unparse(test):
                yield from imported(node, True)
            case _:
                yield from imported(node, deferred)


def sources() -> dict[str, ast.Module]:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
    return {module_of(path): ast.parse(path.read_text()) for path in paths}


TREES = sources()
IMPORTS: Imports = {module: tuple(imported(tree)) for module, tree in TREES.items()}
PACKAGES = {module_of(path) for path in PACKAGE.rglob("__init__.py")}
FOLDERS = sorted(PACKAGES - {"autotune"})


def part_of(module: str) -> str:
    """The name in `ORDER` that a module belongs to."""
    return [*module.split("."), ""][1]


def folder_of(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def target(name: str) -> str:
    """The module that an imported name is, or is of."""
    return name if name in TREES else name.rpartition(".")[0]


def upward(imports: Imports) -> Iterator[str]:
    """Imports of what stands behind the importing folder in `ORDER`."""
    for module, found in imports.items():
        if module in DOORS:
            continue
        mine = ORDER.index(part_of(module))
        for one in found:
            root, _, rest = one.name.partition(".")
            if root != "autotune" or not rest:  # the package itself, which says where it lies
                continue
            other = rest.partition(".")[0]
            if other not in ORDER:
                yield f"{module}:{one.line}: imports {one.name}, which is in no folder of the order"
            elif ORDER.index(other) > mine and (module, one.name) not in UPWARD:
                yield f"{module}:{one.line}: imports {one.name}, which stands behind {part_of(module)}"


def strangers(imports: Imports) -> Iterator[str]:
    """Frameworks outside of their folders."""
    for module, found in imports.items():
        for one in found:
            homes = FRAMEWORKS.get(one.name.partition(".")[0])
            if homes is not None and not any(f"{module}.".startswith(f"autotune.{home}.") for home in homes):
                yield f"{module}:{one.line}: imports {one.name}; that is for {', '.join(homes)}"


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """Some path that comes back to where it began; empty if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def between_folders(imports: Imports) -> dict[str, set[str]]:
    """Which folder imports which. A folder and its own subfolders count as one: a parent lists what its parts fill in."""
    edges: dict[str, set[str]] = {}
    for module, found in imports.items():
        mine = folder_of(module)
        for one in found:
            other = folder_of(target(one.name)) if one.name.startswith("autotune.") else ""
            related = f"{mine}.".startswith(f"{other}.") or f"{other}.".startswith(f"{mine}.")
            if other and module not in DOORS and not related:
                edges.setdefault(mine, set()).add(other)
    return edges


def between_modules(imports: Imports) -> dict[str, set[str]]:
    """Which module needs which to be imported."""
    return {
        module: {target(one.name) for one in found if one.name.startswith("autotune.") and not one.deferred} - {module}
        for module, found in imports.items()
    }


def test_every_module_has_its_place_in_the_order():
    assert {part_of(module) for module in TREES} - {"", "__main__"} == set(ORDER)


def test_each_folder_imports_only_what_stands_before_it():
    found = list(upward(IMPORTS))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("lower", "higher"), list(itertools.pairwise(ORDER)))
def test_an_import_that_is_turned_around_is_found(lower: str, higher: str):
    module, name = f"autotune.{lower}.some", f"autotune.{higher}.other"
    assert not list(upward({name: (Import(1, module),)}))
    (found,) = upward({module: (Import(7, name),)})
    assert found == f"{module}:7: imports {name}, which stands behind {lower}"


@pytest.mark.parametrize(
    "text",
    [
        "from autotune.study import session",
        "from autotune.study.session import tune",
        "import autotune.study.session",
        "def f():\n    from autotune.study.session import tune",
        "if TYPE_CHECKING:\n    from autotune.study.session import Result",
        "class A:\n    def f(self):\n        import autotune.study.session",
        "try:\n    import autotune.study.session\nexcept ImportError:\n    pass",
    ],
)
def test_an_upward_import_is_found_in_every_spelling_and_at_any_depth(text: str):
    (found,) = upward({"autotune.ir.graph": tuple(imported(ast.parse(text)))})
    assert "imports autotune.study" in found
    assert found.endswith("stands behind ir")


def test_each_import_between_folders_would_be_found_if_it_were_turned_around():
    pairs = {
        (part_of(module), part_of(one.name))
        for module, found in IMPORTS.items()
        for one in found
        if module not in DOORS and one.name.startswith("autotune.") and part_of(one.name) != part_of(module)
    }
    assert len(pairs) > 50
    for higher, lower in pairs:
        assert list(upward({f"autotune.{lower}.some": (Import(1, f"autotune.{higher}.other"),)})), (lower, higher)


def test_no_upward_import_is_excused_that_is_gone():
    there = {(module, one.name) for module, found in IMPORTS.items() for one in found}
    assert set(UPWARD) <= there


def test_frameworks_are_imported_in_their_own_folders_only():
    found = list(strangers(IMPORTS))
    assert not found, "\n".join(found)


def test_a_framework_elsewhere_is_found():
    (found,) = strangers({"autotune.planners.auto": (Import(3, "torch.nn"),)})
    assert found.startswith("autotune.planners.auto:3: imports torch.nn")
    assert not list(strangers({"autotune.capture.rewrites.dropout": (Import(3, "torch"),)}))
    assert list(strangers({"autotune.study.sessions": (Import(3, "optuna"),)}))


def test_folders_are_small():
    sizes = Counter(folder_of(module) for module in TREES if module not in PACKAGES)
    assert {folder: size for folder, size in sizes.items() if size > LARGEST} == {}


def test_modules_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LONGEST} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_comes_in_what_goes_out_and_what_to_read_first(folder: str):
    text = ast.get_docstring(TREES[folder]) or ""
    assert re.search(r"^In: .+\.$", text, re.MULTILINE)
    assert re.search(r"^Out: .+\.$", text, re.MULTILINE)
    first = re.search(r"^Read first: (?:`(\w+)`|this file)\.$", text, re.MULTILINE)
    assert first, "no `Read first:` line"
    assert first[1] is None or f"{folder}.{first[1]}" in TREES
    assert text.partition("\n")[0].endswith((".", ":")), "the first line is a sentence"


def test_folders_have_an_init():
    assert all((path.parent / "__init__.py").exists() for path in PACKAGE.rglob("*.py"))


def test_no_public_class_name_is_there_twice():
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_folders_do_not_import_in_circles():
    assert cycle(between_folders(IMPORTS)) == []


def test_the_top_level_stays_a_picture_that_one_can_read():
    """The limits are a choice: 23 boxes and 110 arrows still fit one page."""
    arrows = {
        (part_of(module), part_of(one.name))
        for module, names in IMPORTS.items()
        for one in names
        if one.name.startswith("autotune.")
    }
    boxes = {part_of(module) for module in TREES}
    assert len(boxes) <= 23
    assert len({(lower, higher) for lower, higher in arrows if lower != higher}) <= 110


def test_modules_do_not_import_in_circles():
    assert cycle(between_modules(IMPORTS)) == []


def test_a_circle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_importing_what_the_command_line_needs_loads_nothing_heavy_and_light_names_load_no_framework():
    modules = (
        "autotune",
        "autotune.cli.main",
        "autotune.cli.commands.layout",
        "autotune.planners",
        "autotune.records.trial",
        "autotune.records.plan_file",
    )
    code = (
        "import sys, autotune\n"
        f"for module in {modules}:\n"
        "    __import__(module)\n"
        f"    print(module, *sorted(set(sys.modules) & {HEAVY!r}))\n"
        "for name in ('tune', 'load_plan'):\n"
        "    getattr(autotune, name)\n"
        "    print(name, *sorted(set(sys.modules) & {'torch', 'optuna', 'mlflow'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [*modules, "tune", "load_plan"]
