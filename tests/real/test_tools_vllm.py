"""Tool calls of a real vLLM through the gateway: the same, whichever parser it has, or none.

And vLLM's parsers beside ours on the texts of the case files, where each text's expectation is the judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from proxy.check import probe
from proxy.config import loads
from proxy.probe import Verdict
from tests.real import differential
from tests.real.alike import Clients
from tests.real.conftest import start_or_give_up
from tests.real.differential import PARSERS, Judged
from tests.real.server import RealServer, Unavailable
from tests.real.tool_table import COLUMNS, NO_PARSER, Column, through
from tests.real.tooltalk import CUT, WANTED, assert_cut_safely, hear, wanted

pytestmark = pytest.mark.vllm

DOCS = Path(__file__).parents[2] / "docs" / "tool-calls.md"
VLLMS = [column for column in COLUMNS if column.title.startswith("vLLM")]


@pytest.fixture(scope="module", params=VLLMS, ids=lambda column: column.title.removeprefix("vLLM, "))
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[Column, RealServer]]:
    """One after the other; the first is the one that serves the whole run."""
    column: Column = request.param
    with ExitStack() as stack:
        if column is VLLMS[0]:
            yield column, request.getfixturevalue("vllm")
        else:
            yield column, start_or_give_up(stack, column.make())


@pytest.fixture(scope="module")
def client(backend: tuple[Column, RealServer]) -> Iterator[openai.OpenAI]:
    with through(*backend) as gateway:
        clients = Clients(gateway.url)
        yield clients.openai
        clients.close()
        assert gateway.running() == 0
        assert gateway.complaints == ""


@pytest.mark.parametrize("script", WANTED)
def test_every_script_gives_the_same_calls(
    client: openai.OpenAI, backend: tuple[Column, RealServer], script: str
) -> None:
    assert hear(client, script) == wanted(script, parsed=backend[0].parses)


def test_nothing_is_made_up_of_a_call_that_was_cut(client: openai.OpenAI) -> None:
    assert_cut_safely(hear(client, CUT))


async def test_the_probe_sees_that_tools_are_rendered(backend: tuple[Column, RealServer]) -> None:
    _, server = backend
    text = f'[models.tiny]\n[[backends]]\nname = "b"\nurl = "{server.url}"\n{NO_PARSER}\n'
    found = {finding.what: finding for finding in await probe(loads(text, {}).backends[0], 30.0)}
    assert found["tools"].verdict is Verdict.OK, found["tools"]


# -- vLLM's parsers and ours -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    try:
        return differential.compare(differential.texts())
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_where_they_differ_ours_is_right(judged: list[Judged]) -> None:
    assert len({one.case["id"] for one in judged}) > 200
    settled = [case for case in differential.texts() if not case.get("debatable")]
    assert differential.ours_wrong(settled) == []
    different = [one for one in judged if not one.same and not one.case.get("debatable")]
    assert [one for one in different if not one.wrong and not one.case["expect"].get("incomplete")] == []


def test_every_way_in_which_they_go_wrong_is_in_the_docs(judged: list[Judged]) -> None:
    page = DOCS.read_text("utf-8")
    assert {one.wrong for one in judged if one.wrong and f"| {one.wrong} |" not in page} == set()


def test_both_qwen_names_are_one_parser(judged: list[Judged]) -> None:
    results = {
        parser: [(one.case["id"], one.step, one.detail) for one in judged if one.parser == parser]
        for parser in PARSERS
    }
    assert results["qwen3_xml"] == results["qwen3_coder"]
