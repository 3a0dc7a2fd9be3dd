"""Plays one cell of the fault table against a gateway in this process, and tells what the client saw.

Rules: backend `a` is always chosen first (a policy of one line says so) and has the fault; `b`, where there is one, is well.
Time is a FakeClock's, moved a second at a time and only while nobody has anything to do: what takes a minute for a
client takes a millisecond here, and the seconds that a cell took are part of what it tells. A request that does not
end within `PATIENCE` of these seconds hangs, and the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.abilities import Ability
from proxy.record import Record
from tests.client import Connection, Response
from tests.fake_clock import FakeClock
from tests.faults.leaks import Leaks
from tests.faults.table import Cell, Fault, Phase
from tests.faults.tokens import finishes, with_ids
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.proxy.scenes import QUIET, eventually, polled
from tests.scripted import (
    DONE,
    Call,
    Chunk,
    Close,
    Gate,
    Head,
    LastChunk,
    Raw,
    Received,
    Reset,
    ScriptedBackend,
    Stall,
    Step,
    WaitFor,
    black_hole,
    chat_event,
    closed_port,
    error_json,
    event,
    json_answer,
    sse,
    usage_event,
    whole,
)

PATIENCE = 1000.0
"""Seconds of the fake clock after which a request hangs."""
FIRST, GAP, TOTAL, CONNECT = 60.0, 20.0, 300.0, 5.0
CONFIG = f"""{QUIET}timeout = 2.0
[policy]
file = "first.py"
admission = true
gate.wait_seconds = 60.0
[timeouts]
connect = {CONNECT}
first_token = {FIRST}
first_token_per_1k_tokens = 0.0
gap = {GAP}
total = {TOTAL}
client_idle = 30
keepalive_after = 0
[models.tiny]
limits = {{ requests_per_minute = 1000, tokens_per_minute = 1_000_000_000, concurrent_requests = 1000 }}
"""
ON = '[tiers.balanced]\ncontinuation = "exact"\n'
ONE = "limits.max_in_flight = 1\nlimits.kv_tokens = 100_000_000\nlimits.window_tokens = 10_000_000\n"
MANY = ONE.replace("= 1\n", "= 8\n")
IN_ORDER = 'def score(facts, backend):\n    return {"place": 0.0 if backend.name == "a" else 1.0}\n'

# -- the answer -----------------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
THINKING, TEXT, ARGUMENTS = "Let me look that up.", "Hello there, wait.", '{"city": "Paris"}'
USAGE = (10, 25)
_call = {"id": "call-1", "type": "function", "index": 0, "function": {"name": "look_up", "arguments": ""}}
EVENTS = (
    chat_event({"role": "assistant", "content": ""}),
    chat_event({"reasoning": "Let me"}),
    chat_event({"reasoning": " look that up."}),
    chat_event({"content": "Hello"}),
    chat_event({"content": " there, wait."}),
    chat_event({"tool_calls": [_call]}),
    chat_event({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
    chat_event({"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]}),
    chat_event({}, "tool_calls"),
    usage_event(USAGE),
    DONE,
)
WHOLE = {
    "id": "chatcmpl-scripted",
    "object": "chat.completion",
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "reasoning": THINKING,
                "content": TEXT,
                "tool_calls": [
                    {
                        "id": "call-1",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": ARGUMENTS},
                    }
                ],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": USAGE[0], "completion_tokens": USAGE[1], "total_tokens": sum(USAGE)},
}
SENT = {
    Phase.FIRST_EVENT: 0,
    Phase.ROLE: 1,
    Phase.MID_THINKING: 2,
    Phase.MID_TEXT: 4,
    Phase.MID_TOOL_CALL: 7,
    Phase.LAST_EVENT: 10,
}
"""Events that are sent whole before the fault."""
READ = {
    Phase.MID_THINKING: b"Let me",
    Phase.MID_TEXT: b"Hello",
    Phase.MID_TOOL_CALL: b"city",
    Phase.LAST_EVENT: b"Paris",
}
"""What the client of a stream has read before the fault comes."""
STREAM_HEAD = Head(
    200, [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")]
)
BODY = json.dumps(WHOLE).encode()
PLACES = {Phase.FIRST_EVENT: 1, Phase.LAST_EVENT: len(BODY) - 1} | {
    phase: BODY.index(word) + len(word)
    for phase, word in (
        (Phase.MID_THINKING, b"Let me"),
        (Phase.MID_TEXT, b"Hello"),
        (Phase.MID_TOOL_CALL, b"city"),
    )
}
"""Bytes of a body that is not streamed, sent before the fault."""


def request(text: str = "hi", *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}], "tools": [TOOL]}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


WITH_IDS = with_ids(EVENTS)


def answer(*, stream: bool, ids: bool = False) -> list[Step]:
    """The whole answer. ids: with those of its tokens."""
    if stream:
        return [STREAM_HEAD, *map(Chunk, WITH_IDS if ids else EVENTS), LastChunk()]
    return whole(BODY)


def answered(asked: Received) -> list[Step]:
    """The whole answer, in the way that was asked for."""
    return answer(stream=bool(asked.json.get("stream")), ids=bool(asked.json.get("return_token_ids")))


def goes_on(asked: Received) -> list[Step]:
    """The same of one that finishes what another began, too."""
    return finishes(asked, answered)


# -- time -----------------------------------------------------------------------------------------------------------


class After(Gate):
    """Opens some seconds of the fake clock after somebody began to wait for it."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    async def wait(self) -> None:
        await self._clock.sleep(self._seconds)


async def patiently(
    clock: FakeClock,
    coroutine: Coroutine[Any, Any, Any],
    what: str,
    may_wait: Callable[[], object] = lambda: True,
) -> Any:
    """Its result. Time moves while nothing else does, and `may_wait` says so."""
    task = asyncio.ensure_future(coroutine)
    end = clock.time + PATIENCE
    try:
        while not task.done():
            for _ in range(40):  # what comes over a socket of this machine is there after a turn or two
                await asyncio.sleep(0)
                if task.done():
                    break
            else:
                if not may_wait():
                    await asyncio.sleep(0.001)
                    continue
                if clock.time > end:
                    raise AssertionError(f"{what} hangs: not over after {PATIENCE:g} s")
                clock.advance(1.0)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# -- faults as steps ------------------------------------------------------------------------------------------------


def _before_the_head(fault: Fault, stream: bool, die: Step) -> list[Step]:
    """What a backend does in place of an answer."""
    half = [STREAM_HEAD, LastChunk()] if stream else whole(BODY[: len(BODY) // 2])
    abort: dict[str, Any] = {
        "id": "c",
        "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "abort"}],
    }
    error = {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}
    steps: dict[Fault, list[Step]] = {
        Fault.RESET: [Reset()],
        Fault.FIN: [Close()],
        Fault.STALL: [Stall()],
        Fault.TOO_MANY: error_json(429, "too many", type="RateLimitError", headers=[("retry-after", "7")]),
        Fault.BROKEN: error_json(503, "no engine", type="ServiceUnavailable"),
        Fault.MALFORMED: [Raw(b"SSH-2.0-OpenSSH_9.6\r\n"), Stall()],
        Fault.TRUNCATED: half,
        Fault.FRAMING: [Head(200, [("content-length", "many")]), Stall()],
        Fault.ABORT: sse(chat_event({}, "abort")) if stream else json_answer(abort),
        Fault.ERROR: [STREAM_HEAD, Chunk(event(error)), Chunk(DONE), LastChunk()]
        if stream
        else json_answer(error),
        Fault.DEATH: [die],
    }
    return steps[fault]


def _in_the_answer(fault: Fault, begun: bytes, stream: bool, die: Step) -> list[Step]:
    """The same in the middle of one; `begun`: half of an event is out."""
    error = {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}
    broken = b"data: {oops\n\n" if not begun else b"}oops\n\n"
    steps: dict[Fault, list[Step]] = {
        Fault.RESET: [Reset()],
        Fault.FIN: [Close()],
        Fault.STALL: [Stall()],
        Fault.MALFORMED: [Chunk(broken), Stall()] if stream else [],
        Fault.TRUNCATED: [LastChunk()] if stream else [],
        Fault.FRAMING: [Raw(b"zz\r\n"), Stall()],
        Fault.ABORT: [Chunk(chat_event({}, "abort")), Chunk(DONE), LastChunk()],
        Fault.ERROR: [Chunk(event(error)), Chunk(DONE), LastChunk()],
        Fault.DEATH: [die],
    }
    return steps[fault]


def script(
    cell: Cell, reached: asyncio.Event, seen: asyncio.Event, clock: FakeClock, die: Step
) -> list[Step]:
    """What backend `a` does from the moment it has the request. `reached` is set when the fault is due, `seen`
    awaited before it: the client is where the phase says."""
    fault, stream = cell.fault, cell.stream
    here: list[Step] = [Call(reached.set), WaitFor(seen)]
    benign = fault in (Fault.SIGTERM, Fault.GONE)
    wait: list[Step] = [Stall()] if fault is Fault.GONE else []
    if cell.phase not in SENT:  # queue, connect, send, prefill, reuse
        if fault is Fault.SLOW:
            return [*here, *_slowly(answer(stream=stream, ids=cell.goes_on), clock)]
        if benign:
            return [*here, *wait, *answer(stream=stream, ids=cell.goes_on)]
        return [*here, *_before_the_head(fault, stream, die)]
    if not stream:
        return _half_a_body(cell, here, clock, die)
    count = SENT[cell.phase]
    events = WITH_IDS if cell.goes_on else EVENTS
    sent, following = events[:count], events[count]
    torn = fault not in (Fault.ABORT, Fault.ERROR) and cell.phase is not Phase.LAST_EVENT
    begun = following[: len(following) // 2] if torn else b""
    steps: list[Step] = [STREAM_HEAD, *map(Chunk, sent), *([Chunk(begun)] if begun else []), *here]
    rest: list[Step] = [Chunk(following[len(begun) :]), *map(Chunk, events[count + 1 :]), LastChunk()]
    if fault is Fault.SLOW:
        return [*steps, *_slowly(rest, clock)]
    if benign:
        return [*steps, *wait, *rest]
    return [*steps, *_in_the_answer(fault, begun, stream, die)]


def _half_a_body(cell: Cell, here: list[Step], clock: FakeClock, die: Step) -> list[Step]:
    place = PLACES[cell.phase]
    kind = ("content-type", "application/json")
    chunked = cell.fault is Fault.FRAMING
    head = Head(
        200, [kind, ("transfer-encoding", "chunked") if chunked else ("content-length", str(len(BODY)))]
    )
    begun = Chunk(BODY[:place]) if chunked else Raw(BODY[:place])
    rest: list[Step] = [Raw(BODY[place:])]
    match cell.fault:
        case Fault.SLOW:
            return [
                head,
                begun,
                *here,
                *_slowly([Raw(BODY[i : i + 40]) for i in range(place, len(BODY), 40)], clock),
            ]
        case Fault.SIGTERM:
            return [head, begun, *here, *rest]
        case Fault.GONE:
            return [head, begun, *here, Stall()]
        case Fault.MALFORMED:
            return [head, begun, *here, Raw(b"?" * (len(BODY) - place))]
        case Fault.TRUNCATED:  # whole as HTTP
            return [Head(200, [kind, ("content-length", str(place))]), begun, *here]
    return [head, begun, *here, *_in_the_answer(cell.fault, b"", False, die)]


def _slowly(steps: list[Step], clock: FakeClock) -> list[Step]:
    """Half of the limit before the first step, then half of the gap before each."""
    slow: list[Step] = []
    for number, step in enumerate(steps):
        slow += [WaitFor(After(clock, GAP / 2 if number else GAP * 0.9)), step]
    return slow


# -- playing --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Saw:
    """What a cell came to. seconds: of the fake clock, from the request to its end. ahead: of whoever had the place."""

    response: Response
    record: Record
    seconds: float
    backends: list[str]
    draining: bool = False


async def play(cell: Cell, make_gateway: MakeGateway, folder: Path) -> Saw:
    """One cell, on a gateway of its own; nothing may be left afterwards."""
    (folder / "first.py").write_text(IN_ORDER)
    clock = FakeClock()
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(ScriptedBackend())
        b = await stack.enter_async_context(ScriptedBackend())
        a.default = b.default = goes_on if cell.goes_on else answered
        first: ScriptedBackend | str = a
        if cell.phase is Phase.CONNECT and cell.fault is Fault.REFUSE:
            first = f"http://127.0.0.1:{closed_port()}"
        elif cell.phase is Phase.CONNECT and cell.fault in (Fault.STALL, Fault.GONE):
            first = f"http://127.0.0.1:{stack.enter_context(black_hole())}"
        spare = [b] if cell.spare else []
        limits = {"a": ONE if cell.phase is Phase.QUEUE else MANY, "b": MANY}
        config = CONFIG + ON if cell.goes_on else CONFIG
        gateway = await make_gateway(first, *spare, config=config, per_backend=limits, clock=clock)
        await patiently(clock, polled(gateway), "the first poll")
        if cell.goes_on:
            await _known(gateway, clock)
        leaks = await Leaks.of(gateway, [a, b])
        player = Player(cell, gateway, a, clock)
        saw = await player.play()
        a.release()
        for connection in a.connections:
            if connection.ending is None and connection.transport is not None:
                connection.transport.resume_reading()  # so that it sees the end, too
        await leaks.none_left()
        return saw


async def _known(gateway: Gateway, clock: FakeClock) -> None:
    """What the backends can do is found out; here it is told."""
    abilities = gateway.app.abilities
    await patiently(clock, abilities.settled(), "the questions")
    for name in gateway.app.pool.backends:
        abilities._known[name] = clock.time, Ability(True, "the same")


class Player:
    """One cell in play."""

    def __init__(self, cell: Cell, gateway: Gateway, a: ScriptedBackend, clock: FakeClock) -> None:
        self.cell, self.gateway, self.a, self.clock = cell, gateway, a, clock
        self.reached, self.seen, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    def _die(self) -> None:
        """Every connection reset, the port closed."""
        self.a.stop_listening()
        for connection in self.a.connections:
            if connection.ending is None:
                connection.reset()

    async def play(self) -> Saw:
        cell, gateway, clock = self.cell, self.gateway, self.clock
        async with contextlib.AsyncExitStack() as stack:
            if cell.phase is Phase.REUSE:
                first = await patiently(clock, gateway.chat(), "the first request")
                assert first.status == 200
            ahead = await stack.enter_async_context(self._ahead()) if cell.phase is Phase.QUEUE else None
            self._prepare()
            client = await stack.enter_async_context(await gateway.connect())
            started = clock.time
            text = "x" * (1 << 20) if cell.phase is Phase.SEND else "hi"
            client.send(CHAT, request(text, stream=cell.stream), headers={"x-request-id": "the-one"})
            reading = asyncio.ensure_future(self._follow(client))
            if ahead is not None:
                await self._queue(ahead)
            else:
                await self._act(client)
            response = await patiently(clock, reading, str(cell))
            seconds = clock.time - started
            if self._drain is not None:
                await patiently(clock, self._drain, "the drain")
            if ahead is not None:
                self.over.set()
                await patiently(clock, self._end(ahead), "the request ahead")
        await eventually(
            lambda: any(r.request_id == "the-one" for r, _ in gateway.records.closed), "the record"
        )
        (record,) = [r for r, _ in gateway.records.closed if r.request_id == "the-one"]
        tried = [trace for trace in (record.backend,) if trace is not None]
        return Saw(response, record, seconds, tried, self._drain is not None)

    async def _follow(self, client: Connection) -> Response:
        """Read as a client does; the phases in a stream wait until it has what the phase says."""
        needle = READ.get(self.cell.phase) if self.cell.stream else None
        if needle is not None:
            with contextlib.suppress(AssertionError):
                await client.read_until(needle)
        if self.cell.phase is not Phase.QUEUE or self.cell.fault is Fault.GONE:
            await self.reached.wait()
            self.seen.set()
        if self.cell.fault is Fault.GONE:
            client.close()
            return client.response
        return await client.read()

    def _prepare(self) -> None:
        """Tell backend `a` what to do."""
        cell, a = self.cell, self.a
        die = Call(self._die)
        if cell.phase is Phase.QUEUE:
            return
        steps = (
            script(cell, self.reached, self.seen, self.clock, die) if cell.fault is not Fault.REFUSE else []
        )
        if cell.phase is Phase.CONNECT:
            self.seen.set()
            if cell.fault is Fault.SIGTERM:
                a.answer(answer(stream=cell.stream, ids=cell.goes_on))
            else:
                a.greet(*[steps] * (1 if cell.spare else 3))
        elif cell.phase is Phase.SEND:
            pause, resume = (
                Call(lambda: a.connections[-1].transport.pause_reading()),
                Call(  # type: ignore[union-attr]
                    lambda: a.connections[-1].transport.resume_reading()  # type: ignore[union-attr]
                ),
            )
            if cell.fault is Fault.SIGTERM or cell.fault is Fault.SLOW:
                late: list[Step] = [WaitFor(After(self.clock, FIRST / 2))] if cell.fault is Fault.SLOW else []
                a.greet([pause, Call(self.reached.set), WaitFor(self.seen), *late, resume])
                a.answer(answer(stream=cell.stream, ids=cell.goes_on))
            else:
                a.greet(*[[pause, *steps]] * (1 if cell.spare else 3))
        elif cell.phase is Phase.REUSE or cell.spare:
            a.answer(steps)
        else:
            a.answer(steps, steps, steps)  # whoever asks it again meets the same

    async def _act(self, client: Connection) -> None:
        """What is not the backend's doing: the client, the signal, and a port that is closed."""
        cell = self.cell
        if cell.phase is Phase.CONNECT or cell.phase is Phase.SEND:
            await eventually(
                lambda: any(e.record.attempts for e in self.gateway.app.gateway.exchanges), "a choice"
            )
            if cell.phase is Phase.SEND:
                await eventually(self._dispatched, "the request's dispatch")
            self.reached.set()
        if cell.fault is Fault.SIGTERM:
            self.seen.clear()
            await patiently(self.clock, self.reached.wait(), "the phase")
            self._drain = asyncio.ensure_future(self.gateway.app.drain())
            await eventually(lambda: self.gateway.app.gateway.draining, "the drain")
            self.seen.set()

    def _dispatched(self) -> bool:
        return any(e.record.dispatched_at is not None for e in self.gateway.app.gateway.exchanges)

    # -- the queue ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _ahead(self) -> AsyncIterator[Connection]:
        """A request that has the only place until `over`; the other backend takes nobody."""
        cell, gateway = self.cell, self.gateway
        steps: list[Step] = [WaitFor(self.over)]
        if cell.fault in (Fault.RESET, Fault.FIN):
            steps.append(Reset() if cell.fault is Fault.RESET else Close())
        if cell.fault is Fault.STALL:
            self.a.answer([*steps, *answer(stream=False)])
        else:
            head, *rest = answer(stream=True)
            assert isinstance(head, Head)
            if cell.fault is Fault.REFUSE:  # or its connection would serve the next one
                head = Head(200, [*head.headers, ("connection", "close")])
            self.a.answer([head, *rest[:4], *steps, *rest[4:]])
        if cell.spare:
            gateway.app.pool.set_draining("b", True)
        async with await gateway.connect() as client:
            client.send(CHAT, request("another conversation", stream=cell.fault is not Fault.STALL))
            await self.a.received(0)
            if cell.fault is not Fault.STALL:
                await client.read_until(b"Let me")
            yield client

    async def _queue(self, ahead: Connection) -> None:
        cell, gateway, a = self.cell, self.gateway, self.a
        await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 1, "a request in line")
        self.reached.set()
        if cell.fault is Fault.STALL:
            return
        if cell.fault is Fault.GONE:
            await eventually(lambda: sum(gateway.app.gate.waiting().values()) == 0, "the line to be empty")
            return
        if cell.fault is Fault.SIGTERM:
            self._drain = asyncio.ensure_future(gateway.app.drain())
            await eventually(lambda: gateway.app.gateway.draining, "the drain")
        if cell.fault is Fault.SLOW:
            self.clock.advance(GAP * 0.9)
        if cell.fault is Fault.REFUSE:
            a.stop_listening()
        if cell.fault in (Fault.TOO_MANY, Fault.BROKEN):
            a.answer(*[_before_the_head(cell.fault, cell.stream, Call(self._die))] * (1 if cell.spare else 3))
        if cell.fault is Fault.DEATH:
            self._die()
        self.over.set()
        if cell.spare:
            await eventually(self._let_in, "the request to be let in")
            gateway.app.pool.set_draining("b", False)

    def _let_in(self) -> bool:
        records = [e.record for e in self.gateway.app.gateway.exchanges] + [
            r for r, _ in self.gateway.records.closed
        ]
        return any(r.request_id == "the-one" and r.attempts for r in records)

    async def _end(self, ahead: Connection) -> None:
        with contextlib.suppress(AssertionError):
            await ahead.read()
