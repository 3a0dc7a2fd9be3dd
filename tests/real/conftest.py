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

from tests.real.llama import LlamaServer
from tests.real.server import RealServer, Unavailable
from tests.real.vllm_cpu import VllmServer

pytest.register_assert_rewrite("tests.real.alike")

Server = TypeVar("Server", bound=RealServer)


class StartVllm(Protocol):
    def __call__(self, **options: object) -> VllmServer: ...


class StartLlama(Protocol):
    def __call__(self, **options: object) -> LlamaServer: ...


@pytest.fixture(scope="session")
def llama() -> Iterator[LlamaServer]:
    """One llama-server for the whole run: 4 slots of 4096 tokens, model `tiny`, no key."""
    with ExitStack() as stack:
        yield start_or_give_up(stack, LlamaServer())


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmServer]:
    """One vLLM for the whole run: parsers on, window of 4096 tokens, 4 requests at once, model `tiny`, no key."""
    with ExitStack() as stack:
        yield start_or_give_up(stack, VllmServer())


@pytest.fixture
def start_vllm() -> Iterator[StartVllm]:
    """Starts vLLMs of one's own (VllmServer's options), ended with the test. Each takes most of a minute."""
    with ExitStack() as stack:

        def start(**options: object) -> VllmServer:
            return start_or_give_up(stack, VllmServer(**options))  # type: ignore[arg-type]

        yield start


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
