"""The four endpoints that generate, as far as breaking them needs it: how each is asked, answers and tells an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.wire.errors import Api
from tests.client import Response
from tests.scripted import DONE, Step, chat_event, event, json_answer, sse


@dataclass(frozen=True)
class Dialect:
    """events: a whole streamed answer. Those before `begun` hold its first content, those before `finish` no finish.
    answer: the same, not streamed. own_error: an error event as a server of this endpoint writes it."""

    api: Api
    path: str
    ask: dict[str, Any]
    events: tuple[bytes, ...]
    begun: int
    finish: int
    aborted: tuple[bytes, ...]
    answer: dict[str, Any]
    aborted_answer: dict[str, Any] | None
    own_error: bytes
    ends_with_done: bool = False

    def __str__(self) -> str:
        return self.api.value

    def request(self, *, stream: bool, **more: Any) -> dict[str, Any]:
        return self.ask | ({"stream": True} if stream else {}) | more

    def stream(self, *events: bytes) -> list[Step]:
        """An event stream of these events, ended properly as HTTP."""
        return sse(*(events or self.events), done=False)

    def begin(self, *more: bytes) -> list[Step]:
        """A stream up to its first content and `more`, not ended."""
        return self.stream(*self.events[: self.begun], *more)[:-1]

    @property
    def begun_bytes(self) -> bytes:
        return b"".join(self.events[: self.begun])

    def whole(self, **more: Any) -> list[Step]:
        return json_answer(self.answer | more)

    def error_in(self, value: Any) -> dict[str, Any]:
        """The error in a decoded body, its shape checked."""
        if self.api is Api.MESSAGES:
            assert value["type"] == "error"
            assert set(value["error"]) == {"type", "message"}
        else:
            assert set(value) == {"error"}
            assert set(value["error"]) == {"message", "type", "param", "code"}
            assert value["error"]["code"] is None or isinstance(value["error"]["code"], str)
        error: dict[str, Any] = value["error"]
        assert error["message"]
        return error

    def error_at_end(self, response: Response) -> dict[str, Any]:
        """The in-band error that a stream ends with. The HTTP message is whole, and nothing says that the answer is."""
        assert response.status == 200
        assert response.complete
        assert b"[DONE]" not in response.body
        raw = [e for e in response.body.split(b"\n\n") if e and not e.startswith(b":")][-1]
        last = response.events[-1]
        if self.api in (Api.MESSAGES, Api.RESPONSES):
            assert raw.startswith(b"event: error\n")
        else:
            assert raw.startswith(b"data: ")
        if self.api is Api.RESPONSES:
            assert set(last) == {"type", "code", "message", "param", "sequence_number"}
            assert last["type"] == "error"
            numbers = [e["sequence_number"] for e in response.events]
            assert numbers == list(range(len(numbers)))
            return dict(last)
        return self.error_in(last)


def _completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return event({"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice]})


def _typed(**value: Any) -> bytes:
    return event(value, value["type"])


def _numbered(*values: dict[str, Any]) -> tuple[bytes, ...]:
    return tuple(_typed(**value, sequence_number=number) for number, value in enumerate(values))


def _delta(text: str) -> bytes:
    return _typed(type="content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _stop_reason(reason: str) -> bytes:
    return _typed(type="message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 2})


_MESSAGES = [{"role": "user", "content": "hi"}]
_ERROR = {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}
_RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "model": "tiny", "output": []}
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "content": []}

_chat_start = (chat_event({"role": "assistant", "content": ""}), chat_event({"content": "Hello"}))
_completion_start = (_completion("Hello"),)
_messages_start = (
    _typed(type="message_start", message=_MESSAGE | {"usage": {"input_tokens": 3, "output_tokens": 0}}),
    _typed(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
    _delta("Hello"),
)

DIALECTS = (
    Dialect(
        Api.CHAT,
        "/v1/chat/completions",
        {"model": "tiny", "messages": _MESSAGES},
        (*_chat_start, chat_event({"content": " there"}), chat_event({}, "stop"), DONE),
        begun=2,
        finish=3,
        aborted=(*_chat_start, chat_event({}, "abort"), DONE),
        answer={
            "id": "c",
            "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
        },
        aborted_answer={"id": "c", "choices": [{"index": 0, "message": {}, "finish_reason": "abort"}]},
        own_error=event({"error": _ERROR}),
        ends_with_done=True,
    ),
    Dialect(
        Api.COMPLETIONS,
        "/v1/completions",
        {"model": "tiny", "prompt": "hi"},
        (*_completion_start, _completion(" there"), _completion("", "length"), DONE),
        begun=1,
        finish=2,
        aborted=(*_completion_start, _completion("", "abort"), DONE),
        answer={"id": "c", "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]},
        aborted_answer={"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]},
        own_error=event({"error": _ERROR}),
        ends_with_done=True,
    ),
    Dialect(
        Api.MESSAGES,
        "/v1/messages",
        {"model": "tiny", "messages": _MESSAGES, "max_tokens": 9},
        (
            *_messages_start,
            _delta(" there"),
            _typed(type="content_block_stop", index=0),
            _stop_reason("end_turn"),
            _typed(type="message_stop"),
        ),
        begun=3,
        finish=5,
        aborted=(*_messages_start, _stop_reason("abort"), _typed(type="message_stop")),
        answer=_MESSAGE | {"stop_reason": "end_turn"},
        aborted_answer=_MESSAGE | {"stop_reason": "abort"},
        own_error=_typed(type="error", error={"type": "api_error", "message": "engine died"}),
    ),
    Dialect(
        Api.RESPONSES,
        "/v1/responses",
        {"model": "tiny", "input": "hi"},
        _numbered(
            {"type": "response.created", "response": _RESPONSE | {"status": "in_progress"}},
            {"type": "response.output_text.delta", "item_id": "m", "delta": "Hello"},
            {"type": "response.output_text.delta", "item_id": "m", "delta": " there"},
            {"type": "response.completed", "response": _RESPONSE},
        ),
        begun=2,
        finish=3,
        aborted=(),
        answer=_RESPONSE,
        aborted_answer=None,
        own_error=_typed(
            type="error", code="server_error", message="engine died", param=None, sequence_number=2
        ),
    ),
)
CHAT_DIALECT = DIALECTS[0]
