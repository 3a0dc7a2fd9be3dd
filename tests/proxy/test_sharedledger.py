"""Two gateways that share limits decide as one; and a lost server loses no charge, and makes none twice."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits import NOTHING, Amount, LimitKind, Quota, span
from proxy import sharedledger
from proxy.config import SharedLimits
from proxy.errors import ProxyError
from proxy.keystore import Spent
from proxy.ledger import Entry, LocalLedger
from proxy.sharedledger import BEAT_SECONDS, LEASE_SECONDS, TRY_SECONDS, SharedLedger
from proxy.sharedlink import Link, Lost
from tests.fake_clock import FakeClock
from tests.scripted import closed_port
from tests.valkey import NEEDS_SERVER, ValkeyServer

pytestmark = NEEDS_SERVER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    running = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    running.start()
    yield running
    running.stop()


MADE: list[SharedLedger] = []
WALL = 1_700_000_000 * 10**6
"""What a fake clock adds, in microseconds."""


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    while MADE:
        await MADE.pop().close()


class TimedLink(Link):
    """To a server that lives in the time of the clock."""

    async def call(self, body: bytes) -> bytes:
        seconds, micros = divmod(round(self._clock.wall() * 1e6), 10**6)
        return await super().call(orjson.dumps(orjson.loads(body) | {"time": [str(seconds), str(micros)]}))


@dataclass
class Gateways:
    """Two ledgers that share, and one that is what they should be together."""

    clock: FakeClock
    shared: list[SharedLedger]
    plain: LocalLedger
    locals: list[LocalLedger] = field(default_factory=list)

    def configure(self, quotas: dict[str, Quota]) -> None:
        for ledger in (self.plain, *self.shared):
            ledger.configure(quotas)


def share(
    server: ValkeyServer, clock: FakeClock, prefix: str, **more: object
) -> tuple[SharedLedger, LocalLedger]:
    where = SharedLimits.model_validate({"url": server.url, "prefix": prefix, **more})
    local = LocalLedger(clock)
    ledger = SharedLedger(where, clock, local)
    ledger._link = TimedLink(where, clock)
    MADE.append(ledger)
    return ledger, local


async def gateways(server: ValkeyServer, quotas: dict[str, Quota], start: float = 1000.0) -> Gateways:
    clock, prefix = FakeClock(start), secrets.token_hex(8)
    made = [share(server, clock, prefix) for _ in range(2)]
    both = Gateways(clock, [one for one, _ in made], LocalLedger(clock), [local for _, local in made])
    both.configure(quotas)
    for ledger in both.shared:
        assert await ledger._join()
    return both


QUOTAS = st.builds(
    Quota,
    st.none() | st.integers(1, 10),
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 500),
    st.none() | st.integers(1, 500),
    st.none() | st.integers(1, 10**6).map(lambda billionths: billionths / 1e9),
    st.none() | st.integers(1, 10**6).map(lambda billionths: billionths / 1e9),
)
AMOUNTS = st.just(NOTHING) | st.builds(Amount, st.integers(0, 60), st.integers(0, 200_000))
MICROS = st.just(-1) | st.integers(0, 10**7) | st.integers(0, 10**9) | st.integers(0, 40 * 86_400 * 10**6)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        MICROS,
        st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2)]),
        AMOUNTS,
        AMOUNTS,
        st.booleans(),
    ),
    max_size=40,
)


async def same(
    quotas: list[Quota],
    steps: list[tuple[int, int, tuple[int, ...], Amount, Amount, bool]],
    server: ValkeyServer,
) -> None:
    names = ["key:k", "tenant:t", "model:m"]
    both = await gateways(server, {name: quota for name, quota in zip(names, quotas, strict=True) if quota})
    micros, running = round(both.clock.time * 1e6), list[tuple[int, tuple[str, ...], Amount]]()
    for which, later, payers, ask, used, ends in steps:
        # -1: to midnight, to the microsecond
        micros += later if later >= 0 else -(micros + WALL) % (86_400 * 10**6)
        both.clock.time = micros / 1e6
        if ends and running:
            holder, paid, asked = running.pop(later % len(running))
            both.shared[holder].settle(paid, asked, used)
            both.plain.settle(paid, asked, used)
            if both.shared[holder]._sending is not None:
                await both.shared[holder]._sending  # the other gateway may be asked next
            continue
        who = tuple(names[place] for place in payers if quotas[place])
        if not who:
            continue
        found: Entry = await both.shared[which].enter(who, ask)
        assert found == await both.plain.enter(who, ask)
        if found[0] is None:
            running.append((which, who, ask))
    for ledger in both.shared:
        assert ledger._alone == 0
        await ledger.close()
    MADE.clear()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(QUOTAS, min_size=3, max_size=3), STEPS)
def test_two_gateways_decide_as_one_that_has_all_of_it(
    server: ValkeyServer,
    quotas: list[Quota],
    steps: list[tuple[int, int, tuple[int, ...], Amount, Amount, bool]],
) -> None:
    before, sharedledger.LEASE_SECONDS = sharedledger.LEASE_SECONDS, 1e9  # months go by here
    try:
        asyncio.run(same(quotas, steps, server))
    finally:
        sharedledger.LEASE_SECONDS = before


async def test_who_asks_for_nothing_does_not_fit_into_a_budget_that_is_used_up(server: ValkeyServer) -> None:
    _, (one, other), _ = await counted(server, Quota(tokens_per_day=10))
    assert [await let_in(one, 9), await let_in(other), await let_in(one, 1)] == [True, True, True]
    assert [await let_in(one), await let_in(other)] == [False, False]


async def test_every_day_and_month_begins_when_the_calendar_says(server: ValkeyServer) -> None:
    clock, (one, _), _ = await counted(server, Quota(tokens_per_day=5, tokens_per_month=5))
    kinds = LimitKind.TOKENS_DAY, LimitKind.TOKENS_MONTH
    for year in (1999, 2000, 2023, 2024, 2025, 2099, 2100, 2101):
        for month in range(1, 13):
            first = datetime(year, month, 1, tzinfo=UTC).timestamp()
            for wall in (first - 1, first, first + 86_399, first + 86_400 * 27.5):
                clock.time = wall - WALL / 1e6
                name = f"key:{wall}"
                one.configure({name: Quota(tokens_per_day=5, tokens_per_month=5)})
                await one._join()  # as much time may have passed as a lease has
                assert (await one.enter((name,), Amount(1)))[0] is None
                (account,) = one._local.accounts((name,))
                assert [budget.begins for budget in account.budgets] == [
                    span(kind, wall)[0] for kind in kinds
                ]


# -- calls ---------------------------------------------------------------------------------------------------

KEY = ("key:k",)


class CountedLink(TimedLink):
    """calls: bodies. lose: how many of the next calls are carried out, and their answers lost. away: none is."""

    def __init__(self, settings: SharedLimits, clock: FakeClock) -> None:
        super().__init__(settings, clock)
        self.calls: list[dict[str, object]] = []
        self.lose = 0
        self.away = False

    async def call(self, body: bytes) -> bytes:
        self.calls.append(orjson.loads(body))
        if self.away:
            raise Lost("away")
        answer = await super().call(body)
        if self.lose:
            self.lose -= 1
            raise Lost("the answer was lost")
        return answer


async def counted(
    server: ValkeyServer, quota: Quota, **more: object
) -> tuple[FakeClock, list[SharedLedger], list[CountedLink]]:
    clock, prefix = FakeClock(), secrets.token_hex(8)
    ledgers = [share(server, clock, prefix, **more)[0] for _ in range(2)]
    for ledger in ledgers:
        ledger._link = CountedLink(ledger._link._settings, clock)
        ledger.configure({KEY[0]: quota})
        assert await ledger._join()
    links = [ledger._link for ledger in ledgers]
    return clock, ledgers, links  # type: ignore[return-value]


async def let_in(ledger: SharedLedger, ask: int = 0) -> bool:
    return (await ledger.enter(KEY, Amount(ask)))[0] is None


async def sent(ledger: SharedLedger) -> None:
    while ledger._sending is not None:
        await ledger._sending


async def spent(ledger: SharedLedger) -> int:
    """Of the day, as the server says."""
    refusal = (await ledger.enter(KEY, Amount(10**9)))[0]
    assert refusal is not None
    return refusal.used


async def test_what_comes_in_one_turn_of_the_loop_is_one_call(server: ValkeyServer) -> None:
    _, (one, other), (link, _) = await counted(server, Quota(concurrent_requests=50))
    came = await asyncio.gather(*(let_in(one) for _ in range(60)))
    assert sum(came) == 50
    assert len(link.calls) == 2, "the first was to join"
    assert not await let_in(other)
    for _ in range(50):
        one.settle(KEY, Amount(0), Amount(0))
    await sent(one)
    assert len(link.calls) == 3
    assert await let_in(other)


async def test_a_place_that_a_dead_gateway_held_is_free_when_its_lease_is_over_and_one_that_beats_keeps_its_own(
    server: ValkeyServer,
) -> None:
    clock, (dead, alive), _ = await counted(server, Quota(concurrent_requests=2))
    assert [await let_in(dead), await let_in(alive), await let_in(alive)] == [True, True, False]
    for seconds in (7.0, LEASE_SECONDS - 7.5):
        clock.time += seconds
        assert not await let_in(alive)
    clock.time += 1.0
    assert [await let_in(alive), await let_in(alive)] == [True, False]


async def test_a_gateway_that_slept_longer_than_its_lease_states_anew_what_it_holds(
    server: ValkeyServer,
) -> None:
    clock, (slept, other), _ = await counted(server, Quota(concurrent_requests=2))
    assert await let_in(slept)
    clock.time += LEASE_SECONDS + 1
    assert await let_in(other)
    assert [await let_in(slept), await let_in(slept), await let_in(other)] == [False, False, False]
    slept.settle(KEY, Amount(0), Amount(0))
    await sent(slept)
    assert [await let_in(slept), await let_in(other)] == [True, False]


async def test_a_beat_renews_the_lease_of_who_has_nothing_to_say(server: ValkeyServer) -> None:
    clock, (idle, other), (link, _) = await counted(server, Quota(concurrent_requests=1))
    idle._beating = asyncio.create_task(idle._beat())
    assert await let_in(idle)
    for _ in range(round(2 * LEASE_SECONDS / TRY_SECONDS)):
        await asyncio.sleep(0)
        clock.advance(TRY_SECONDS)
        await asyncio.sleep(0)
        await sent(idle)
    assert len(link.calls) < 2 + 3 * LEASE_SECONDS / BEAT_SECONDS
    assert not await let_in(other)
    await idle.close()
    assert await let_in(other), "and who stops gives its places back at once"


@pytest.mark.parametrize("turns", range(8))
async def test_who_leaves_while_the_server_is_asked_leaves_no_place_behind(
    server: ValkeyServer, turns: int
) -> None:
    _, (one, other), _ = await counted(server, Quota(concurrent_requests=1))
    asking = asyncio.create_task(let_in(one))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if not asking.cancelled():
        one.settle(KEY, Amount(0), Amount(0))
    await sent(one)
    assert one._held == {}
    assert await let_in(other)


# -- the server comes and goes -------------------------------------------------------------------------------


async def test_a_lost_answer_charges_once_and_leaves_no_place_behind(server: ValkeyServer) -> None:
    _, (one, other), (link, _) = await counted(server, Quota(tokens_per_day=1000, concurrent_requests=2))
    assert await let_in(one, 10)
    assert await let_in(one, 10)
    link.lose = 1
    one.settle(KEY, Amount(10), Amount(100))
    await sent(one)
    assert link.lose == 0
    assert one._alone == 0
    assert await spent(other) == 100 + 10
    link.lose = 1
    assert await let_in(one, 10), "asked again, as another member"
    assert not await let_in(other)
    for _ in range(2):
        one.settle(KEY, Amount(10), Amount(7))
    await sent(one)
    assert await spent(other) == 114
    assert one._held == {}
    assert [await let_in(other), await let_in(one), await let_in(one)] == [True, True, False]


async def test_what_did_not_arrive_is_charged_when_the_server_is_back_and_places_are_stated(
    server: ValkeyServer,
) -> None:
    _, (one, other), (link, _) = await counted(server, Quota(tokens_per_day=1000, concurrent_requests=3))
    assert [await let_in(one, 10) for _ in range(3)] == [True] * 3
    link.away = True
    one.settle(KEY, Amount(10), Amount(100))
    await sent(one)
    assert not one.up
    one.settle(KEY, Amount(10), Amount(20))
    assert await let_in(one, 30)  # on its own
    one.settle(KEY, Amount(30), Amount(3))
    link.away = False
    assert await one._join()
    await sent(one)
    assert await spent(other) == 100 + 20 + 3 + 10, "the last one is held"
    assert [await let_in(other) for _ in range(3)] == [True, True, False]
    one.settle(KEY, Amount(10), Amount(0))
    await sent(one)
    assert [await let_in(other), await let_in(other)] == [True, False]


async def test_a_server_that_forgot_everything_is_told_again(tmp_path: Path) -> None:
    own = ValkeyServer(tmp_path)
    own.start()
    try:
        quota = Quota(requests_per_minute=10, tokens_per_day=1000, concurrent_requests=3)
        _, (one, other), _ = await counted(own, quota)
        assert await let_in(one, 10)
        one.settle(KEY, Amount(10), Amount(100))
        assert [await let_in(one, 10) for _ in range(2)] == [True, True]
        own.kill()
        own.start()
        assert await let_in(one, 10), "no request fails for it"
        assert not await let_in(other, 10)
        assert await spent(other) == 100 + 30
        for _ in range(3):
            one.settle(KEY, Amount(10), Amount(1))
        await sent(one)
        for _ in range(6):
            assert await let_in(other)
            other.settle(KEY, Amount(0), Amount(0))
        refusal = (await other.enter(KEY, Amount(0)))[0]
        assert refusal is not None
        assert refusal.kind is LimitKind.REQUESTS
    finally:
        own.stop()


@pytest.mark.parametrize(
    ("how", "third"), [("local", "rate_limit"), ("open", "let in"), ("closed", "503 limits_unavailable")]
)
async def test_alone_a_gateway_does_as_told_says_so_once_and_counts(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture, how: str, third: str
) -> None:
    clock, (one, other), (link, _) = await counted(server, Quota(requests_per_minute=2), on_failure=how)
    assert [await let_in(other), await let_in(one)] == [True, True]
    link.away = True
    said = []
    with caplog.at_level(logging.WARNING, "tierline.limits"):
        for _ in range(4):
            try:
                said.append("let in" if await let_in(one) else "rate_limit")
            except ProxyError as error:
                said.append(f"{error.status} {error.code}")
        clock.time += 10
        link.away = False
        assert await one._join()
    assert said == [third] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(",")[0].partition(":")[0] for line in lines] == [
        "limits are not shared",
        "limits are shared again",
    ]
    counts = {name: values for name, _, _, values in one.counters()}
    assert counts["tierline_shared_limits_losses"] == [((), 1)]
    assert counts["tierline_shared_limits_alone"] == [((how,), 4)]


async def test_a_budget_that_the_store_knows_is_told_to_a_server_that_does_not(server: ValkeyServer) -> None:
    _, (one, other), _ = await counted(server, Quota(tokens_per_day=1000))
    today = int(one._clock.wall() // 86_400) * 86_400
    one._local.load([Spent(KEY[0], "tokens_per_day", today, 400)])
    assert await let_in(one, 10)
    assert await spent(other) == 410


async def test_a_server_with_a_password_over_tls_or_a_socket_is_reached_and_a_wrong_one_said(
    tmp_path: Path,
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    cert = ca.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    own = ValkeyServer(
        tmp_path,
        *("--requirepass", "right", "--unixsocket", str(tmp_path / "s")),
        *("--tls-port", str(port := closed_port()), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")),
    )
    own.start()
    try:
        for url, password, more, why in (
            (own.url, "right", {}, None),
            (f"unix://{tmp_path}/s", "right", {}, None),
            (f"valkeys://localhost:{port}/1", "right", {"ca": "ca.pem"}, None),
            (
                f"valkeys://127.0.0.1:{port}",
                "right",
                {"ca": "ca.pem"},
                "doesn't match|mismatch|not valid for",
            ),
            (f"rediss://127.0.0.1:{port}", "right", {"verify": False}, None),
            (f"valkeys://localhost:{port}", "right", {}, "CERTIFICATE_VERIFY_FAILED"),
            (own.url, "wrong", {}, "password"),
            (f"valkey://127.0.0.1:{closed_port()}", "right", {}, "connect"),
        ):
            where = SharedLimits.model_validate(
                {"url": url, "password": "env:P", **more},
                context={"env": {"P": password}, "folder": tmp_path},
            )
            ledger = SharedLedger(where, FakeClock(), LocalLedger(FakeClock()))
            ledger.configure({KEY[0]: Quota(concurrent_requests=1)})
            assert await ledger._join() == (why is None), url
            if why is None:
                assert await let_in(ledger)
            else:
                assert re.search(why, str(ledger._why)), ledger._why
                assert password not in str(ledger._why)
            await ledger.close()
    finally:
        own.stop()
