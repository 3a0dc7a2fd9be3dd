"""Tool calls of a real llama-server through the gateway, as the openai SDK puts them together.

The other scripts are none for it: its grammar forbids what they say, and the model writes noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.real.alike import Clients
from tests.real.gateway import GatewayProcess
from tests.real.llama import LlamaServer
from tests.real.tooltalk import hear, wanted

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def client(llama: LlamaServer) -> Iterator[openai.OpenAI]:
    with GatewayProcess({"llama": llama}) as gateway:
        clients = Clients(gateway.url)
        yield clients.openai
        clients.close()
        assert gateway.running() == 0
        assert gateway.complaints == ""


@pytest.mark.parametrize("script", ["tool", "text_tool", "text_tag", "no_args"])
def test_a_call_is_right_streamed_and_whole(client: openai.OpenAI, script: str) -> None:
    assert hear(client, script, llama_cpp=True) == wanted(script, parsed=False)
