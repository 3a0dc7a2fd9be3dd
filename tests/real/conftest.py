"""Real servers for tests.

Where one cannot run, its tests are skipped and say why; TIERLINE_REQUIRE_REAL=1 makes that a failure, for
machines on which they must run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol, TypeVar

import pytest

from tests.real.llama import LlamaServer, Unavailable

Server = TypeVar("Server", bound=LlamaServer)


class StartLlama(Protocol):
    def __call__(self, **options: object) -> LlamaServer: ...


@pytest.fixture(scope="session")
def llama() -> Iterator[LlamaServer]:
    """One llama-server for the whole run: 4 slots of 4096 tokens, model `tiny`, no key."""
    with ExitStack() as stack:
        yield start_or_give_up(stack, LlamaServer())


@pytest.fixture
def start_llama() -> Iterator[StartLlama]:
    """Starts llama-servers of one's own (LlamaServer's options), ended with the test."""
    with ExitStack() as stack:

        def start(**options: object) -> LlamaServer:
            return start_or_give_up(stack, LlamaServer(**options))  # type: ignore[arg-type]

        yield start


def start_or_give_up(stack: ExitStack, server: Server) -> Server:
    """The server, running until the stack is left; else the test is skipped or fails."""
    try:
        stack.enter_context(server)
    except Unavailable as reason:
        if os.environ.get("TIERLINE_REQUIRE_REAL"):
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))
    return server
