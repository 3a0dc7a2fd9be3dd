"""The streams whose events have a type: `/v1/messages` and `/v1/responses`. Rules as in `streams`."""

from __future__ import annotations

from typing import Any

from proxy.wire.streams import MalformedStream, StreamReader, text_of


def _object(payload: dict[str, Any], key: str) -> dict[str, Any]:
    """A member that is an object where it is there at all."""
    value = payload.get(key) or {}
    if not isinstance(value, dict):
        raise MalformedStream(f"{key} is not an object")
    return value


_OPENING = ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "ping")
"""These say nothing of the answer by themselves."""


class MessagesStream(StreamReader):
    """Anthropic's `/v1/messages`: named events, message_stop at the end."""

    __slots__ = ()
    leaf_keys = (b"text", b"thinking", b"partial_json")

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        kind = payload.get("type")
        if kind == "content_block_delta":
            delta = _object(payload, "delta")
            if delta.get("text") or delta.get("thinking") or delta.get("partial_json"):
                self.content = True
                self.opening = False
                return True, True
        elif kind == "content_block_start":
            if _object(payload, "content_block").get("type") in ("tool_use", "server_tool_use"):
                self.content = True
        elif kind == "message_start":
            message = _object(payload, "message")
            self.response_id = text_of(message.get("id"))
            self.usage = dict(_object(message, "usage"))
        elif kind == "message_delta":
            self.finish_reason = text_of(_object(payload, "delta").get("stop_reason")) or self.finish_reason
            self.usage = {**(self.usage or {}), **_object(payload, "usage")}
            if self.aborted:
                self.notable = True
                return False, False
        elif kind == "message_stop":
            self.ended = self.notable = True
            return self.complete(), False  # an end mark on half an answer would make it look whole
        elif kind is None:
            raise MalformedStream("an event without type")
        self.opening = self.opening and not self.content and kind in _OPENING
        return True, False

    def complete(self) -> bool:
        # vLLM has no word for an answer that it gives up: it stops without a stop_reason.
        return self.ended and self.finish_reason is not None and not self.aborted


class ResponsesStream(StreamReader):
    """`/v1/responses`: typed, numbered events, one of response.completed/incomplete/failed at the end."""

    __slots__ = ("sequence",)

    def __init__(self, model_swap: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(model_swap)
        self.sequence = -1
        """sequence_number of the last event."""

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        kind = payload.get("type")
        if not isinstance(kind, str):
            raise MalformedStream("an event without type")
        self.opening = (
            False  # its first event names a response that the backend keeps: there is no other of it
        )
        number = payload.get("sequence_number")
        self.sequence = number if type(number) is int else self.sequence + 1
        if kind.endswith(".delta"):
            if payload.get("delta"):
                self.content = True
        elif kind in ("response.created", "response.in_progress"):
            self.response_id = text_of(_object(payload, "response").get("id")) or self.response_id
        elif kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            response = _object(payload, "response")
            self.ended = self.notable = True
            self.usage = response.get("usage") or self.usage
            self.finish_reason = text_of(response.get("status")) or kind.removeprefix("response.")
        return True, False

    def complete(self) -> bool:
        return self.ended
