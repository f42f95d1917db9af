"""The direction of dependency: checks every import of the package against the list of rooms in docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# From top to bottom. A module may import from its own room and from rooms below it, never from one above.
ROOMS = (
    ("service/__main__", "service/cli"),
    ("service/server",),
    ("service/bench",),
    ("service/setup",),
    ("service/agent", "service/batch", "service/knowledge", "service/mcp"),
    ("service/catalog",),
    ("service/hub",),
    ("service/registry",),
    ("service/api",),
    ("service/peers",),
    ("service/engine",),
    ("service/text", "service/vision"),
    ("service/encode",),
    ("service/model",),
    ("service/cache",),
    ("service/loader",),
    ("service/kernels",),
    ("service/quant",),
    ("service/memory",),
    (
        "service/console",
        "service/python_process",
        "service/launch_module",
        "service/work_folder",
        "service/core",
        "service/config",
        "service/toml_file",
        "service/errors",
        "service/tree_names",
    ),
)
# Within the lowest: each of these may use those after it, nothing else.
BASE_ORDER = (
    "service/console",
    "service/python_process",
    "service/launch_module",
    "service/work_folder",
    "service/config",
    "service/toml_file",
    "service/core",
    "service/errors",
    "service/tree_names",
)
ROOT = Path(__file__).resolve().parents[1]
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "folder_paths"}
COMFYUI |= {"node_helpers", "nodes", "server"}
RUN_TIME = {"torch", "safetensors", "tokenizers", "aiohttp", "jinja2", "numpy", "PIL", "psutil", "tomli", "yarl"}
# Optional extras and engines that a bench compares with; imported where they are used, never at module level.
LATE = {"transformers", "triton", "cuda", "llguidance", "prometheus_client", "llama_cpp"}
# Modules that only part of the nodes may import.
COMFYUI_FREE = {
    "values",
    "wildcards",
    "presets",
    "phase",
    "options",
    "show",
    "write",
    "picture",
    "desk",
    "correction",
    "__init__",
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """(module, whether it is inside the package, whether it is at the top level) for each import; inside names start at
    the root.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in _top_level(tree)}
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", False, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level]
            module = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                deeper = (*module, alias.name)
                exists = (ROOT.joinpath(*deeper)).with_suffix(".py").exists() or ROOT.joinpath(*deeper).is_dir()
                yield "/".join(deeper if exists else module), True, id(node) in top


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import, blocks for type checkers left out."""
    waiting = list(tree.body)
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            waiting += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]


def room_of(module: str) -> int:
    """The position of a module in ROOMS. KeyError for one in no room."""
    for place, names in enumerate(ROOMS):
        if any(module == name or module.startswith(name + "/") for name in names):
            return place
    raise KeyError(module)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")


def violations_of(path: Path) -> list[str]:
    name = name_of(path)
    found = []
    for module, inside, _ in imports(path):
        if not inside:
            if module.split(".")[0] == "onedesk":
                found.append(f"{name} imports {module} absolutely; use a relative import")
            continue
        if not module.startswith("service"):
            found.append(f"{name} imports {module}, which is outside of service/")
        elif module != "service" and room_of(name) > room_of(module):
            found.append(f"{name} imports {module}, which is above it")
    return found


@pytest.mark.parametrize("path", sources("service"), ids=name_of)
def test_service_depends_downwards_only(path: Path):
    if name_of(path) == "service":
        assert not list(imports(path))
    else:
        assert violations_of(path) == []


def test_the_vocabulary_depends_on_nothing_but_itself():
    for place, name in enumerate(BASE_ORDER):
        inside = {module for module, is_inside, _ in imports(ROOT / f"{name}.py") if is_inside}
        assert inside <= set(BASE_ORDER[place + 1 :])
        assert "torch" not in {module for module, _, _ in imports(ROOT / f"{name}.py")}


@pytest.mark.parametrize("path", sources("service"), ids=name_of)
def test_service_knows_no_comfyui_and_only_what_is_installed(path: Path):
    for module, inside, at_top in imports(path):
        first = module.split(".")[0]
        if inside or first in sys.stdlib_module_names or first == "__future__":
            continue
        assert first not in COMFYUI, f"{name_of(path)} imports {module} of ComfyUI"
        assert first in RUN_TIME | LATE, f"{name_of(path)} imports {module}, which is no run-time dependency"
        late = first in LATE and not (first == "triton" and path.name.startswith("triton_"))
        assert not (at_top and late), f"{name_of(path)} imports {module} at its top; import it where it is used"


def test_triton_is_imported_only_when_the_fused_kernels_are_chosen():
    fused = {path.stem for path in sources("service/kernels") if path.stem.startswith(("triton_", "cuda_"))} - {
        "cuda_plan"
    }
    for path in sources("service"):
        for module, inside, at_top in imports(path):
            if inside and at_top and module.rsplit("/", 1)[-1] in fused and path.stem not in fused:
                pytest.fail(f"{name_of(path)} imports {module} at its top, and Triton with it")


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, in order; empty if there is none. Found by depth-first search."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for imported in sorted(graph.get(module, ())):
            circle = search(imported, [*path, module])
            if circle:
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(graph) if (circle := search(module, []))), [])


def test_no_import_circle():
    """Imports inside functions and for type checkers do not count."""
    graph = {
        name_of(path): {module for module, inside, at_top in imports(path) if inside and at_top}
        for path in (*sources("service"), *sources("nodes"), *sources("lab"))
    }
    assert circle_in(graph) == []


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize("path", sources("nodes"), ids=name_of)
def test_nodes_use_service_and_comfyui(path: Path):
    for module, inside, _ in imports(path):
        first = module.split(".")[0]
        if inside:
            assert module.split("/")[0] in ("nodes", "service"), f"{name_of(path)} imports {module}"
        else:
            assert first in sys.stdlib_module_names | COMFYUI | {
                "torch",
                "PIL",
                "__future__",
            }, f"{name_of(path)} imports {module}"
        if path.stem in COMFYUI_FREE and not inside:
            assert first not in COMFYUI, f"{name_of(path)} is meant to work without ComfyUI, but imports {module}"


@pytest.mark.parametrize("path", sources("lab") + sources("training"), ids=name_of)
def test_the_laboratory_uses_service_alone(path: Path):
    for module, inside, _ in imports(path):
        if inside:
            assert module.split("/")[0] in (
                "service",
                path.relative_to(ROOT).parts[0],
            ), f"{name_of(path)} imports {module}"


def test_only_the_bridge_touches_comfyuis_memory_manager():
    touching = {
        path.name
        for path in sources("nodes")
        for module, inside, _ in imports(path)
        if not inside
        and module.startswith(("comfy.model_management", "comfy.model_patcher", "comfy.memory_management"))
    }
    assert touching == {"bridge.py"}


def test_the_check_itself_finds_an_import_that_goes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "service" / "memory").mkdir(parents=True)
    for name in ("api", "errors", "memory/pool"):
        (tmp_path / "service" / f"{name}.py").write_text("")
    wrong = tmp_path / "service" / "memory" / "pool.py"
    wrong.write_text("from ..api import OpenModel\nfrom .. import errors\nfrom onedesk.service import core\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert violations_of(wrong) == [
        "service/memory/pool imports service/api, which is above it",
        "service/memory/pool imports onedesk.service absolutely; use a relative import",
    ]


def test_the_package_imports_without_comfyui_and_without_torch():
    code = (
        "import sys, onedesk, onedesk.nodes, onedesk.nodes.wildcards, onedesk.nodes.options,"
        " onedesk.nodes.presets;assert callable(onedesk.comfy_entrypoint) and onedesk.WEB_DIRECTORY;wrong = {'comfy',"
        " 'comfy_api', 'folder_paths', 'torch', 'transformers'} & set(sys.modules); assert not wrong, wrong"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr


def test_the_door_of_comfyui_is_small_and_has_one_form():
    text = (ROOT / "__init__.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 25
    assert "NODE_CLASS_MAPPINGS" not in text
