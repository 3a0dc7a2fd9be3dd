"""What keys and limits add to a request. The goal is 10 µs: finding the key, entering and settling."""

from __future__ import annotations

import time

import pytest
from multidict import CIMultiDict
from pytest_benchmark.fixture import BenchmarkFixture

from proxy.access import ANYBODY, Caller, Callers
from proxy.config import loads
from proxy.endpoints import RELAYED
from proxy.errors import Outcome
from proxy.keys import read
from proxy.ledger import LocalLedger
from proxy.limiter import Limiter
from proxy.record import Record

CHAT = RELAYED["/v1/chat/completions"]
KEY = "tl-abcd1234-" + "x" * 43
EVERYTHING = (
    "{ requests_per_minute = 100000000, tokens_per_minute = 10000000000, concurrent_requests = 100000000, "
    "tokens_per_month = 1000000000000 }"
)
CONFIG = """
[[backends]]
name = "a"
url = "http://127.0.0.1:1"
[models.m]
price = { prompt = 1.0, completion = 2.0 }
[server]
store = "unused.db"
[[server.keys]]
name = "k"
key = "env:K"
tenant = "t"
limits = KEY
[tenants.t]
limits = TENANT
"""
CASES = {
    "requests": ("{ requests_per_minute = 100000000 }", "{}"),
    "requests and tokens": ("{ requests_per_minute = 100000000, tokens_per_minute = 10000000000 }", "{}"),
    "everything, of key and tenant": (EVERYTHING, EVERYTHING),
}


class World:
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def made(key: str, tenant: str) -> tuple[Limiter, Callers]:
    config = loads(CONFIG.replace("KEY", key, 1).replace("TENANT", tenant), {"K": KEY})
    limiter = Limiter(LocalLedger(World()))  # type: ignore[arg-type]
    callers, quotas = read(config, (), b"secret")
    limiter.configure(config, quotas)
    return limiter, callers


@pytest.mark.parametrize(("key", "tenant"), CASES.values(), ids=CASES)
def test_enter_and_settle(benchmark: BenchmarkFixture, key: str, tenant: str) -> None:
    limiter, callers = made(key, tenant)
    caller = callers.find(CIMultiDict({"Authorization": f"Bearer {KEY}"}), 0.0) or ANYBODY
    record = Record("r", "chat", "/v1/chat/completions", 0.0, 0.0)
    record.target, record.outcome = "m", Outcome.OK
    record.prompt_tokens, record.completion_tokens = 100, 20

    def live() -> None:
        entering = limiter.enter(caller, "m", CHAT, 110, 200, record)
        try:
            entering.send(None)
        except StopIteration as done:
            limiter.settle(done.value, record)

    benchmark(live)
    assert record.charged_tokens == 120


def test_find_a_key(benchmark: BenchmarkFixture) -> None:
    keys = [(bytes([n % 256, n // 256] * 16), Caller(f"k{n}"), None) for n in range(1000)]
    _, callers = made("{}", "{}")
    many = Callers([*keys, *((h, c, None) for h, (c, _) in callers._by_hash.items())], b"secret")
    headers = CIMultiDict({"Host": "x", "Authorization": f"Bearer {KEY}"})
    found = benchmark(lambda: many.find(headers, 0.0))
    assert found is not None
    assert found.tenant == "t"
