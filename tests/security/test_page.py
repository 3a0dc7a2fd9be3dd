"""docs/security.md: everything that was tried names the test that tries it again, and everything tried here is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
TRIED = re.compile(r"^- .+ `(tests/[\w/]+\.py)::(\w+)`$", re.MULTILINE)


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_line_of_what_was_tried_names_a_test_that_is_there() -> None:
    tried = PAGE.partition("## What was tried")[2]
    lines = [line for line in tried.splitlines() if line.startswith("- ")]
    named = TRIED.findall(tried)
    assert len(named) == len(lines) > 60
    for path, name in named:
        assert name in names_in(ROOT / path), f"{path}::{name}"


def test_every_test_of_this_folder_is_in_the_list() -> None:
    named = {name for _, name in TRIED.findall(PAGE)}
    for path in Path(__file__).parent.glob("test_*.py"):
        missing = {name for name in names_in(path) if name.startswith("test_")} - named
        assert path.name == "test_page.py" or not missing, missing
