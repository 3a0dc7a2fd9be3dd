"""docs/routing.md names everything that routing can do, under the headings that it promises."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from policies import (
    FILTERS,
    RANKINGS,
    SCORERS,
    BreakerParams,
    ChooseReason,
    DropReason,
    Failure,
    RetryParams,
    RouterParams,
    ShedReason,
    Spill,
    TokenRatio,
)
from policies.params import AdmissionParams, PredictParams, SpeculationParams, WorkingSetParams

PAGE = Path(__file__).parents[2].joinpath("docs", "routing.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_filter_and_scorer_has_a_section_in_the_order_of_its_table() -> None:
    assert list(SECTIONS) == [f.__name__ for f in FILTERS] + [name for name, _ in SCORERS]


@pytest.mark.parametrize("name", SECTIONS)
def test_each_section_has_the_fixed_headings(name: str) -> None:
    headings = re.findall(r"^\*\*(.+?):\*\*", SECTIONS[name], re.MULTILINE)
    wanted = ["Does", "Formula", "Reads", "When a signal is missing", "Parameters"]
    yes_or_no = {"unhealthy", "draining"}  # a mark that is set or not needs no formula
    assert headings == [heading for heading in wanted if heading != "Formula" or name not in yes_or_no]


@pytest.mark.parametrize("word", [*DropReason, *ChooseReason, *ShedReason, *Spill, *Failure, *RANKINGS])
def test_every_reason_failure_and_policy_is_named(word: str) -> None:
    assert f"`{word}`" in PAGE


PARAMS = (
    RouterParams(),
    TokenRatio(),
    RetryParams(),
    BreakerParams(),
    PredictParams(),
    SpeculationParams(),
    WorkingSetParams(),
    AdmissionParams(),
)


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: type(params).__name__)
def test_every_parameter_is_named_with_its_default(params: object) -> None:
    for field in fields(params):  # type: ignore[arg-type]
        default = getattr(params, field.name)
        said = re.findall(rf"`(?:\w+\.)*{field.name}` \(?([\d.]*\d)", PAGE)
        if isinstance(default, tuple | bool):
            assert re.search(rf"`(?:\w+\.)*{field.name}`", PAGE)
            continue
        assert said, field.name
        assert {float(number) for number in said} == {float(default)}, field.name
