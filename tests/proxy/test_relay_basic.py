from tests.proxy.conftest import MakeGateway
from tests.scripted import ScriptedBackend


async def test_a_chat_goes_through(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.chat()
    print(response)
    assert response.status == 200
    record = await gateway.record()
    print(record)
    response = await gateway.chat(stream=True)
    print(response)
    assert response.text == "Hello there."
    print(await gateway.record(1))
