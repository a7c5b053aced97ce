"""Dependencies point one way, and the entry module stays light."""

import ast
from pathlib import Path

import pytest

import vllm_nvfp4_pertoken

PACKAGE = Path(vllm_nvfp4_pertoken.__file__).parent
NAME = PACKAGE.name

# Layer of a module -> layers of ours that it may import. The first match of a prefix counts.
ALLOWED = {
    "engine": {"engine", "experts", "checkpoints", "nvfp4", "errors", "testing"},
    "experts": {"experts", "nvfp4", "errors"},
    "checkpoints": {"checkpoints", "nvfp4", "errors", "testing"},
    "training": {"training", "experts", "checkpoints", "nvfp4", "errors"},
    "testing": {"nvfp4", "errors"},
    "nvfp4": {"errors"},
    "errors": set(),
    "serving": {"errors"},
    "demo": {"checkpoints", "serving", "nvfp4", "errors"},
    "cli_output": set(),
    "cli_checkpoints": {"cli_output", "checkpoints", "errors"},
    "cli_inspect": {"cli_output", "checkpoints", "errors"},
    "cli": {
        "cli_checkpoints",
        "cli_inspect",
        "demo",
        "serving",
        "checkpoints",
        "engine",
        "errors",
        "__init__",
    },
    "__init__": {"engine"},
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_arrows_point_one_way(module: Path) -> None:
    layer = module.parts[0].removesuffix(".py")
    for name in imports(PACKAGE / module):
        parts = name.split(".")
        if parts[0] != NAME:
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        if not (PACKAGE / target).exists() and not (PACKAGE / f"{target}.py").exists():
            target = "__init__"  # a name of the package itself, such as its version
        assert target in ALLOWED[layer] | {"__init__"}, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_engine_imports_vllm(module: Path) -> None:
    uses = {name for name in imports(PACKAGE / module) if name.split(".")[0] == "vllm"}
    if module.parts[0] != "engine":
        assert not uses, f"{module} imports {uses}"


def test_volatile_names_of_vllm_come_from_one_file() -> None:
    for path in (PACKAGE / "engine").glob("*.py"):
        uses = {name for name in imports(path) if name.split(".")[0] == "vllm"}
        if path.name not in ("host.py", "registration.py"):
            assert not uses, f"{path.name} imports {uses}"
