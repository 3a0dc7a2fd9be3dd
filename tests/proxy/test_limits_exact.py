"""200 clients at once against limits of keys, a tenant and a model: exact, by an account of fractions beside the ledger."""

from __future__ import annotations

from functools import partial

import pytest

from tests.agreement import on_idle_clock
from tests.limits import LIMITS, load, problems
from tests.limits_live import run
from tests.valkey import NEEDS_SERVER


@pytest.mark.parametrize("seconds", [10.0, pytest.param(120.0, marks=pytest.mark.slow)])
def test_every_decision_among_200_clients_is_that_of_plain_sums(seconds: float) -> None:
    found = on_idle_clock(partial(load, clients=200, seconds=seconds))
    assert problems(found) == []
    refused = {why.partition(" by ")[2] for why in found.ledger.refused}
    for name, limits in LIMITS.items():
        if name.startswith("key:"):
            own = {f"{name} {kind}" for kind in limits}
            assert not own or own & refused, f"{name} came up against no limit of its own"
    assert "tenant:crowd concurrent_requests" in refused
    assert found.ledger.let_in.total() > 100
    assert found.ledger.beyond > 20, "some took more than was reserved"
    assert found.seen["left"] > 5


@pytest.mark.slow
@NEEDS_SERVER
async def test_two_gateways_in_processes_of_their_own_let_in_what_one_may() -> None:
    said, wrong = await run(clients=200, seconds=15.0, workers=1, gateways=2)
    assert wrong == [], said
