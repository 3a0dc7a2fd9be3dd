"""Loops: the gateway runs on uvloop, so its tests do, too; tests/proxy runs a part on asyncio's own loop as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests import tally

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop by default; a module that sets `LOOPS = "both"` runs on both."""
    if getattr(getattr(item, "module", None), "LOOPS", None) == "both":
        return LOOPS
    return {"uvloop": LOOPS["uvloop"]}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tally)
