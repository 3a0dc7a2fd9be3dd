"""The layers of DESIGN, checked by reading the source: imports point down, and some modules own what they own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for top in ("proxy", "policies") for p in (ROOT / top).rglob("*.py"))

# Higher may import lower. A name stands for the module or package of that name.
LAYERS = (
    ("wire", "policies", "_lane", "sharedscript"),
    ("errors", "config", "clock", "tomltext", "lane", "turns", "listen", "logs", "channel", "merge"),
    ("upgrade",),
    (
        "upstream",
        "front",
        "entrance",
        "patience",
        "turnaway",
        "tls",
        "origins",
        "record",
        "recorder",
        "recordrow",
        "recordschema",
        "recordstore",
        "endpoints",
        "owners",
        "keystore",
        "access",
        "ledger",
        "sharedlink",
        "sharedledger",
        "explain",
        "reload",
        "kept",
        "keyrows",
        "series",
        "histogram",
        "tracecontext",
        "spans",
        "requestlog",
        "decisions",
    ),
    ("attempt", "tap"),
    ("watch", "kinds", "backend"),
    ("pool", "metrics", "health", "relay", "gate"),
    ("messages",),
    ("headers", "refusals", "local", "intake", "limiter", "keys"),
    ("toolwork", "toolcheck", "aside", "farewell"),
    ("classify", "tokenizer", "abilities", "stored"),
    ("textway",),
    ("failover", "continuing", "hedging"),
    ("exchange",),
    ("handler", "adminapi", "ui"),
    ("remote", "seat"),
    ("app", "sim", "simulate", "replay", "report", "admincommands", "keycommands"),
    ("owner",),
    ("serve",),
    ("probe",),
    ("check", "bench", "doctor", "proving", "top"),
    ("cli", "worker"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

PURE_FORBIDDEN = frozenset(
    {
        "asyncio",
        "time",
        "socket",
        "os",
        "io",
        "threading",
        "logging",
        "subprocess",
        "pathlib",
        "random.SystemRandom",
    }
)
# policies may use the type `Random`, handed in; wire has no use for chance at all.
OWNERS = {
    "pydantic": {"config"},
    "prometheus_client": {"metrics"},
    "opentelemetry": {"spans"},
    "valkey": {"sharedlink"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer's name: `policies`, or the first part below `proxy`."""
    if module.split(".")[0] == "policies":
        return "policies"
    parts = module.split(".")
    return parts[1] if parts[0] == "proxy" and len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at run time) of every import; those under TYPE_CHECKING are not at run time."""
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            yield module, node.lineno, id(node) not in typing_only
            if module in ("proxy", "random"):
                for alias in node.names:
                    yield f"{module}.{alias.name}", node.lineno, id(node) not in typing_only


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_point_down(path: Path) -> None:
    here = layer_of(module_of(path))
    for module, line, at_run_time in imports(path):
        there = layer_of(module)
        if not at_run_time:
            continue  # a name for the type checker
        if here is None or there is None or here == there or there in ("__version__",):
            continue
        assert there in RANK, f"{path}:{line}: {there} has no layer: add it to LAYERS"
        assert here in RANK, f"{here} has no layer: add it to LAYERS"
        assert RANK[there] < RANK[here] or (RANK[there] == RANK[here] and RANK[here] not in (0,)), (
            f"{path.relative_to(ROOT)}:{line}: {here} may not import {there}"
        )


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_pure_layers_do_no_io_and_know_no_time(path: Path) -> None:
    layer = layer_of(module_of(path))
    if layer not in ("wire", "policies"):
        return
    allowed = {"orjson"} if layer == "wire" else set()
    stdlib = __import__("sys").stdlib_module_names
    for module, line, _ in imports(path):
        top = module.split(".")[0]
        assert top not in PURE_FORBIDDEN, f"{path}:{line}: {layer} imports {module}"
        if layer == "wire":
            assert top != "random", f"{path}:{line}: wire has no chance"
        elif module.startswith("random."):
            assert module == "random.Random", f"{path}:{line}: of random, only the type Random"
        assert top in stdlib or top in ("proxy", "policies") or top in allowed, (
            f"{path}:{line}: {layer} imports {module}"
        )
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input"), f"{path}:{node.lineno}: I/O in {layer}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_some_libraries_have_one_importer(path: Path) -> None:
    layer = layer_of(module_of(path))
    for module, line, _ in imports(path):
        owners = OWNERS.get(module.split(".")[0])
        assert owners is None or layer in owners, f"{path}:{line}: {module} belongs to {owners}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_only_clock_touches_time(path: Path) -> None:
    if layer_of(module_of(path)) == "clock":
        return
    forbidden = {("asyncio", name) for name in ("sleep", "timeout", "timeout_at", "wait_for")} | {
        ("time", name) for name in ("time", "monotonic", "perf_counter", "sleep", "monotonic_ns", "time_ns")
    }
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in forbidden, f"{path}:{node.lineno}: use the clock"
            if node.attr in ("call_later",):
                raise AssertionError(f"{path}:{node.lineno}: use the clock")
            if node.attr == "time" and isinstance(node.value, ast.Name) and "loop" in node.value.id:
                raise AssertionError(f"{path}:{node.lineno}: use the clock")


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_every_module_says_its_rules_and_stays_readable(path: Path) -> None:
    text = path.read_text("utf-8")
    if not text.strip():
        return
    assert ast.get_docstring(ast.parse(text)), f"{path}: no header"
    assert text.count("\n") <= 450, f"{path}: longer than a module may be"
