"""Two gateways and one server of shared limits: exact under everybody at once, and as told when the server is killed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policies.limits import Amount
from proxy.sharedledger import SharedLedger
from tests.client import Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import LEAST_LOAD, QUIET
from tests.scripted import Received, ScriptedBackend, Steps, WaitFor, chat_json
from tests.valkey import NEEDS_SERVER, ValkeyServer

pytestmark = NEEDS_SERVER
KEY, FREE = {"authorization": "Bearer sk-k"}, {"authorization": "Bearer sk-l"}
CLIENTS = 200
AT_ONCE = 37
LONG = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    running = ValkeyServer(tmp_path, remembers=True)
    running.start()
    yield running
    running.stop()


def ledger(gateway: Gateway) -> SharedLedger:
    assert gateway.app.shared is not None
    return gateway.app.shared


async def pair(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    server: ValkeyServer,
    at_once: int,
    how: str = "local",
) -> list[Gateway]:
    """Key `k` may have so many at once; of `l` only a budget that is never used up."""
    made = []
    for name in ("one", "other"):
        text = (
            f'{QUIET}{LEAST_LOAD}[limits.shared]\nurl = "{server.url}"\non_failure = "{how}"\ntimeout = 10\n'
            f'[server]\nport = 0\nstore = "{name}.db"\n[[server.keys]]\nname = "k"\nkey = "env:K"\n'
            f"limits = {{ concurrent_requests = {at_once}, tokens_per_day = 1000000000 }}\n"
            '[[server.keys]]\nname = "l"\nkey = "env:L"\nlimits = { tokens_per_day = 1000000000 }\n'
        )
        per = {"a": "limits.max_in_flight = 1000"}
        made.append(await make_gateway(backend, config=text, env={"K": "sk-k", "L": "sk-l"}, per_backend=per))
    return made


async def patient(gateway: Gateway) -> Response:
    """An answer that comes when everybody has asked: with 200 clients on a slow machine that takes a while."""
    async with await gateway.connect() as connection:
        connection.send(CHAT, chat(max_tokens=5), headers=KEY)
        return await connection.read(within=LONG)


def asking(gateway: Gateway, count: int) -> list[asyncio.Task[Response]]:
    return [asyncio.ensure_future(patient(gateway)) for _ in range(count)]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(LONG):
            while not condition():  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"waited {LONG:g} s for {what}") from None


async def statuses(tasks: list[asyncio.Task[Response]]) -> Counter[int]:
    return Counter(answer.status for answer in await asyncio.gather(*tasks))


class Held:
    """A backend whose answers to key `k` wait until `release`; those to come do, too."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend
        self._gate = asyncio.Event()
        self.begun = 0
        backend.default = self._answer

    def _answer(self, request: Received) -> Steps:
        if request.json.get("max_tokens") != 5:
            return chat_json(usage=(2, 1))
        self.begun += 1
        return [WaitFor(self._gate), *chat_json(usage=(11, 3))]

    async def holds(self, count: int) -> None:
        await eventually(lambda: self.begun == count, f"{count} requests at the backend")

    def release(self) -> None:
        self._gate.set()
        self._gate, self.begun = asyncio.Event(), 0


async def settled(gateways: list[Gateway]) -> None:
    for gateway in gateways:
        one = ledger(gateway)
        await eventually(lambda g=gateway: not g.app.gateway.exchanges, "the end of all requests")  # type: ignore[misc]
        await eventually(lambda x=one: x.up and x._sending is None and not x._owed, "the last charges")  # type: ignore[misc]
        assert one._held == {}


async def is_charged_once(gateways: list[Gateway], key: str) -> None:
    """The server says of the day what the records of both say together."""
    await settled(gateways)
    refusal = (await ledger(gateways[0]).enter((f"key:{key}",), Amount(10**12)))[0]
    assert refusal is not None
    charged = sum(r.charged_tokens or 0 for g in gateways for r, _ in g.records.closed if r.key == key)
    assert refusal.used == charged > 0


async def test_200_clients_at_two_gateways_get_what_one_account_allows_and_no_place_less(
    make_gateway: MakeGateway, backend: ScriptedBackend, server: ValkeyServer
) -> None:
    gateways, held = await pair(make_gateway, backend, server, AT_ONCE), Held(backend)
    for _ in range(2):
        tasks = [task for n in range(CLIENTS) for task in asking(gateways[n % 2], 1)]
        await eventually(lambda t=tasks: sum(one.done() for one in t) == CLIENTS - AT_ONCE, "the refusals")  # type: ignore[misc]
        await held.holds(AT_ONCE)
        held.release()
        assert await statuses(tasks) == {200: AT_ONCE, 429: CLIENTS - AT_ONCE}
        await settled(gateways)
    await is_charged_once(gateways, "k")


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("local", {200: 1, 429: 9}, {200: 3, 429: 7}),
        ("open", {200: 10}, {200: 10}),
        ("closed", {503: 10}, {503: 10}),
    ],
)
async def test_a_server_that_is_killed_under_load_leaves_each_gateway_as_told_and_limits_are_exact_again_after(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    server: ValkeyServer,
    caplog: pytest.LogCaptureFixture,
    how: str,
    first: dict[int, int],
    second: dict[int, int],
) -> None:
    gateways, held = await pair(make_gateway, backend, server, 4, how), Held(backend)
    one, other = gateways
    stop = asyncio.Event()
    seen: Counter[tuple[int, str | None]] = Counter()

    async def load(gateway: Gateway) -> None:
        while not stop.is_set():
            answer = await gateway.chat(headers=FREE)
            seen[answer.status, answer.json.get("error", {}).get("code")] += 1

    clients = [asyncio.ensure_future(load(gateways[n % 2])) for n in range(6)]
    running = asking(one, 3)
    await held.holds(3)
    running += asking(other, 1)
    await held.holds(4)
    assert await statuses(asking(one, 1) + asking(other, 1)) == {429: 2}
    with caplog.at_level(logging.WARNING, "tierline.limits"):
        server.kill()
        for gateway, expected in ((one, first), (other, second)):
            before = held.begun
            came = asking(gateway, 10)
            await held.holds(before + expected.get(200, 0))
            running += came
            left = [task for task in came if not task.done()]
            await eventually(
                lambda tasks=came, may=expected: sum(t.done() for t in tasks) == 10 - may.get(200, 0),  # type: ignore[misc]
                "those turned away",
            )
            assert len(left) >= expected.get(200, 0)
        held.release()
        await asyncio.gather(*running)
        again = asking(one, 1) + asking(other, 1)  # they run when the server comes back
        await held.holds(0 if how == "closed" else 2)
        server.start()
        await eventually(lambda: ledger(one).up and ledger(other).up, "the server")
    tasks = [task for n in range(20) for task in asking(gateways[n % 2], 1)]
    let_in = 4 - held.begun
    await eventually(lambda: sum(task.done() for task in tasks) == 20 - let_in, "the refusals")
    await held.holds(4)
    held.release()
    assert await statuses(tasks) == {200: let_in, 429: 20 - let_in}
    assert await statuses(again) == ({503: 2} if how == "closed" else {200: 2})
    stop.set()
    await asyncio.gather(*clients)
    allowed = {(200, None)} | ({(503, "limits_unavailable")} if how == "closed" else set())
    assert set(seen) == allowed
    lines = [record.getMessage().partition(",")[0] for record in caplog.records if "limits" in record.name]
    assert sorted(lines) == ["limits are not shared"] * 2 + ["limits are shared again"] * 2
    await is_charged_once(gateways, "l")
    await is_charged_once(gateways, "k")
