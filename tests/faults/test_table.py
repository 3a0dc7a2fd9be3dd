"""Every cell of the fault table (docs/faults.md): what the client sees, what the record says, and that nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import ChargedBy, Ending
from tests.client import Response
from tests.faults import page
from tests.faults.drive import ARGUMENTS, CONNECT, FIRST, GAP, TEXT, THINKING, TOTAL, USAGE, Saw, play
from tests.faults.table import CELLS, Cell, End, Fault, Phase
from tests.proxy.conftest import MakeGateway
from tests.proxy.dialects import CHAT_DIALECT

TOKENS_BEFORE = {Phase.MID_THINKING: 2, Phase.MID_TEXT: 9, Phase.MID_TOOL_CALL: 20}
"""Of the answer, in the events that came whole."""
SHARE = 3
"""Every third cell in a normal run."""


def params() -> list[Any]:
    """The cells; all but a third are for `make test-all`."""
    return [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if n % SHARE else [])
        for n, cell in enumerate(CELLS)
    ]


@pytest.mark.parametrize("cell", params())
async def test_a_cell_comes_to_the_end_that_the_table_says(
    make_gateway: MakeGateway, tmp_path: Path, cell: Cell
) -> None:
    saw = await play(cell, make_gateway, tmp_path)
    ENDS[cell.end](cell, saw)
    _charged(cell, saw)
    assert saw.seconds <= _limit(cell), "longer than the limits of one attempt allow"


def _charged(cell: Cell, saw: Saw) -> None:
    """What limits were charged for it, once."""
    record = saw.record
    if cell.end in (End.SAME, End.OTHER, End.GOES_ON):
        assert (record.charged_tokens, record.charged_by) == (sum(USAGE), ChargedBy.USAGE)
    elif cell.end in (End.ERROR, End.SHED) or record.dispatched_at is None:
        assert (record.charged_tokens, record.charged_by) == (0, ChargedBy.NOTHING)
    else:
        assert record.charged_by in (ChargedBy.ESTIMATE, ChargedBy.USAGE)
        assert (record.charged_tokens or 0) > 0


# -- the ends --------------------------------------------------------------------------------------------------------


def _answered(cell: Cell, saw: Saw, backend: str, begun_by: str | None = None) -> None:
    response, record = saw.response, saw.record
    assert (response.status, response.complete) == (200, True)
    assert (record.outcome, record.status, record.error) == ("ok", 200, None)
    assert record.backend == backend
    assert response.headers["x-tierline-backend"] == (begun_by or backend)
    assert (record.prompt_tokens, record.completion_tokens) == USAGE
    assert record.finish_reason == "tool_calls"
    thinking, text, arguments, finish = (_streamed if cell.stream else _whole)(response)
    assert (thinking, text, finish) == (THINKING, TEXT, ["tool_calls"])
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    if cell.stream:
        assert response.events[-1] == "[DONE]"
        assert response.body.count(b"[DONE]") == 1
        assert len({e["id"] for e in response.events[:-1]}) == 1, "one answer, not parts of two"


def same(cell: Cell, saw: Saw) -> None:
    _answered(cell, saw, "a")
    again = cell.phase is Phase.REUSE and cell.fault in (Fault.RESET, Fault.FIN)
    assert saw.record.attempts == (2 if again else 1)


def other(cell: Cell, saw: Saw) -> None:
    _answered(cell, saw, "b")
    assert saw.record.attempts in ((2, 3) if cell.phase is Phase.REUSE else (2,))


def goes_on(cell: Cell, saw: Saw) -> None:
    _answered(cell, saw, "b", begun_by="a")
    assert saw.record.attempts == 2
    assert saw.record.continuation is Ending.WHOLE
    ((name, tokens, by),) = saw.record.legs
    assert (name, by) == ("b", "token")
    assert tokens == TOKENS_BEFORE[cell.phase]
    assert b'token_ids":[' not in saw.response.body


def error(cell: Cell, saw: Saw) -> None:
    told, response, record = cell.told, saw.response, saw.record
    assert (response.status, response.complete) == (told.status, True)
    found = CHAT_DIALECT.error_in(response.json)
    assert found["code"] == told.code
    assert (record.outcome, record.status) == (told.outcome, told.status)
    assert record.first_delta_at is None
    assert record.backend == response.headers["x-tierline-backend"] == "a"
    if cell.fault is Fault.TOO_MANY:
        assert response.headers["retry-after"] == "7", "the backend's own word"
    assert b"Hello" not in response.body


def in_band(cell: Cell, saw: Saw) -> None:
    told, response, record = cell.told, saw.response, saw.record
    found = CHAT_DIALECT.error_at_end(response)
    assert found["code"] == told.code
    assert (record.outcome, record.status) == (told.outcome, 200)
    thinking, text, arguments, finish = _streamed(response)
    for begun, full in ((thinking, THINKING), (text, TEXT), (arguments, ARGUMENTS)):
        assert full.startswith(begun), "what came is a true beginning"
    assert thinking
    if cell.phase is not Phase.LAST_EVENT:
        assert not [reason for reason in finish if reason != "abort"], "nothing says that it is whole"
        assert "abort" not in finish
    assert record.attempts == 1, "nothing is asked twice once the client has seen something"


def shed(cell: Cell, saw: Saw) -> None:
    response, record = saw.response, saw.record
    assert (response.status, record.outcome) == (429, "shed")
    assert response.json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert record.attempts == 0


def cancelled(cell: Cell, saw: Saw) -> None:
    assert saw.record.outcome == "cancelled"
    assert saw.record.attempts == (0 if cell.phase is Phase.QUEUE else 1)
    assert saw.seconds <= 1, "at once"


ENDS = {
    End.SAME: same,
    End.OTHER: other,
    End.ERROR: error,
    End.GOES_ON: goes_on,
    End.IN_BAND: in_band,
    End.SHED: shed,
    End.CANCELLED: cancelled,
}


def _streamed(response: Response) -> tuple[str, str, str, list[str]]:
    """Thinking, text, the call's arguments and the finish reasons, as a client joins them."""
    choices = [c for e in response.events if isinstance(e, dict) for c in e.get("choices", ())]
    deltas = [choice["delta"] for choice in choices]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    return (
        "".join(delta.get("reasoning") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(call.get("arguments") or "" for call in calls),
        [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
    )


def _whole(response: Response) -> tuple[str, str, str, list[str]]:
    (choice,) = response.json["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    return message["reasoning"], message["content"], call["function"]["arguments"], [choice["finish_reason"]]


def _limit(cell: Cell) -> float:
    """Seconds that a cell may take: the limit that ends it, and a little for the second attempt."""
    slack = 8.0
    if cell.fault is Fault.SLOW:
        return TOTAL
    if cell.fault is not Fault.STALL:
        return slack
    if cell.phase is Phase.QUEUE:
        return 60 + slack
    if cell.phase is Phase.CONNECT:
        return CONNECT + slack
    before = cell.phase in (Phase.SEND, Phase.PREFILL, Phase.REUSE)
    if not cell.stream:
        return (TOTAL if before else GAP) + slack
    return (FIRST if before or cell.phase in (Phase.FIRST_EVENT, Phase.ROLE) else GAP) + slack


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_this_table() -> None:
    shown = page.PATH.read_text("utf-8")
    assert page.BEGIN in shown
    assert shown == page.text(shown), "python -m tests.faults.page writes it"


def test_the_third_of_a_normal_run_has_every_phase_and_every_fault() -> None:
    chosen = [cell for number, cell in enumerate(CELLS) if number % SHARE == 0]
    assert {cell.phase for cell in chosen} == set(Phase)
    assert {cell.fault for cell in chosen} == set(Fault)
    assert {cell.end for cell in chosen} == set(End)
