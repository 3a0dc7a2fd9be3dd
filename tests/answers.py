"""What a scripted backend sends: steps, and whole answers made of them, in vLLM's shape.

Plain values: a test cuts, splices and reorders them. Nothing is mended on the way out: no header is added, no
framing is put right, so that a broken answer can be written down as one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from tests.captures import Capture

Headers = Sequence[tuple[str, str]]


class Gate(Protocol):
    """What a script can wait for: an asyncio.Event, or anything like it."""

    def wait(self) -> Awaitable[object]: ...


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers, as given."""

    status: int = 200
    headers: Headers = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a chunked body, framing and all in one write."""

    data: bytes


@dataclass(frozen=True, slots=True)
class LastChunk:
    """The end of a chunked body."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes as they are."""

    data: bytes


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Go on when the gate opens."""

    gate: Gate


@dataclass(frozen=True, slots=True)
class Call:
    """Call something of the test's: open a gate, move a fake clock."""

    function: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Stall:
    """Wait for `backend.release()`: a backend that hangs."""


@dataclass(frozen=True, slots=True)
class Close:
    """Send what is unsent, then FIN."""


@dataclass(frozen=True, slots=True)
class Reset:
    """RST at once; what is unsent is lost."""


Step = Head | Chunk | LastChunk | Raw | WaitFor | Call | Stall | Close | Reset
Steps = Sequence[Step]


def head_bytes(head: Head) -> bytes:
    """As they go over the wire."""
    known = head.status in {status.value for status in HTTPStatus}
    reason = head.reason or (HTTPStatus(head.status).phrase if known else "Status")
    lines = [
        f"HTTP/1.1 {head.status} {reason}",
        *(f"{name}: {value}" for name, value in head.headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


# -- whole answers


def whole(
    body: bytes, status: int = 200, content_type: str | None = "application/json", headers: Headers = ()
) -> list[Step]:
    """An answer with a content-length."""
    kind = [("content-type", content_type)] if content_type else []
    return [
        Head(status, [*kind, ("content-length", str(len(body))), *headers]),
        *([Raw(body)] if body else []),
    ]


def json_answer(value: object, status: int = 200, headers: Headers = ()) -> list[Step]:
    return whole(_compact(value), status, headers=headers)


def error_json(
    status: int,
    message: str,
    *,
    type: str = "BadRequestError",
    param: str | None = None,
    code: int | None = None,
    headers: Headers = (),
) -> list[Step]:
    """An error in vLLM's shape: `code` is the HTTP status as a number."""
    error = {"message": message, "type": type, "param": param, "code": status if code is None else code}
    return json_answer({"error": error}, status, headers)


def chat_json(
    text: str | None = "Hello.",
    *,
    finish: str = "stop",
    usage: tuple[int, int] = (10, 5),
    tool_calls: Sequence[tuple[str, str]] = (),
    model: str = "tiny",
    headers: Headers = (),
) -> list[Step]:
    """A chat completion not streamed. usage: prompt and completion tokens; tool_calls: name, arguments."""
    message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    if tool_calls:
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(tool_calls)
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return json_answer(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": model,
            "choices": [choice],
            "usage": _usage(usage),
        },
        headers=headers,
    )


def metrics_page(
    *,
    running: float = 0,
    waiting: float = 0,
    kv_usage: float = 0.0,
    generated: int | None = None,
    model: str = "tiny",
) -> list[Step]:
    """vLLM's /metrics, as far as routing reads it; generated: tokens, of the counters only with it."""
    labels = f'{{engine="0",model_name="{model}"}}'
    text = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{labels} {float(running)}\n"
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
        "# TYPE vllm:num_requests_waiting gauge\n"
        f"vllm:num_requests_waiting{labels} {float(waiting)}\n"
        "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f"vllm:kv_cache_usage_perc{labels} {float(kv_usage)}\n"
    )
    if generated is not None:
        text += (
            "# TYPE vllm:generation_tokens_total counter\n"
            f"vllm:generation_tokens_total{labels} {float(generated)}\n"
            "# TYPE vllm:num_preemptions_total counter\n"
            f"vllm:num_preemptions_total{labels} 0.0\n"
        )
    return whole(text.encode(), content_type="text/plain; version=0.0.4; charset=utf-8")


def models_page(model: str = "tiny", window_tokens: int = 4096) -> list[Step]:
    """vLLM's /v1/models."""
    entry = {"id": model, "object": "model", "owned_by": "vllm", "max_model_len": window_tokens}
    return json_answer({"object": "list", "data": [entry]})


# -- streams

_SSE = ("content-type", "text/event-stream; charset=utf-8")
_CHUNKED = ("transfer-encoding", "chunked")

DONE = b"data: [DONE]\n\n"


def event(data: object, name: str | None = None) -> bytes:
    """One SSE event; `data` is JSON unless it is a string."""
    text = data.encode() if isinstance(data, str) else _compact(data)
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % text


def sse(*events: object, done: bool = True, status: int = 200, headers: Headers = ()) -> list[Step]:
    """An event stream, one chunk an event. An event is bytes as they are, or what `event` takes."""
    chunks = [Chunk(e if isinstance(e, bytes) else event(e)) for e in events]
    end = [Chunk(DONE)] if done else []
    return [Head(status, [_SSE, _CHUNKED, *headers]), *chunks, *end, LastChunk()]


def chat_event(
    delta: Mapping[str, object], finish: str | None = None, *, index: int = 0, model: str = "tiny"
) -> bytes:
    """One chat.completion.chunk."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event(_chunk_object([choice], model))


def usage_event(usage: tuple[int, int], *, cached: int | None = None, model: str = "tiny") -> bytes:
    """The last event of a stream with usage: no choices."""
    return event(_chunk_object([], model) | {"usage": _usage(usage, cached)})


def chat_events(
    text: str | Sequence[str],
    *,
    finish: str | None = "stop",
    usage: tuple[int, int] | None = None,
    reasoning: Sequence[str] = (),
    model: str = "tiny",
) -> list[bytes]:
    """A chat stream's events before `[DONE]`: role, reasoning, text (split at its spaces), finish, usage."""
    pieces = _words(text) if isinstance(text, str) else text
    events = [chat_event({"role": "assistant", "content": ""}, model=model)]
    events += [chat_event({"reasoning": piece}, model=model) for piece in reasoning]
    events += [chat_event({"content": piece}, model=model) for piece in pieces]
    if finish is not None:
        events.append(chat_event({}, finish, model=model))
    if usage is not None:
        events.append(usage_event(usage, model=model))
    return events


def chat_stream(
    text: str | Sequence[str] = "Hello there.",
    *,
    finish: str | None = "stop",
    usage: tuple[int, int] | None = None,
    reasoning: Sequence[str] = (),
    model: str = "tiny",
    done: bool = True,
    headers: Headers = (),
) -> list[Step]:
    """A chat stream in vLLM's shape. finish None: it stops without one; done False: no `[DONE]`."""
    events = chat_events(text, finish=finish, usage=usage, reasoning=reasoning, model=model)
    return sse(*events, done=done, headers=headers)


def tool_stream(
    name: str = "get_weather",
    arguments: Sequence[str] = ('{"city": "', "Paris", '"}'),
    *,
    usage: tuple[int, int] | None = None,
    finish: str = "tool_calls",
) -> list[Step]:
    """A stream with one tool call: the name in one delta, then its arguments in pieces."""
    call = {"id": "chatcmpl-tool-0", "type": "function", "index": 0, "function": {"name": name}}
    deltas: list[Mapping[str, object]] = [{"role": "assistant", "content": ""}, {"tool_calls": [call]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in arguments]
    events = [*map(chat_event, deltas), chat_event({}, finish)]
    return sse(*events, *([usage_event(usage)] if usage else []))


def after(steps: Steps, chunks: int, *extra: Step) -> list[Step]:
    """The same answer with more steps behind its n-th chunk (0: behind the head, before any chunk)."""
    place = [i for i, step in enumerate(steps) if isinstance(step, Head | Chunk)][chunks] + 1
    return [*steps[:place], *extra, *steps[place:]]


def cut(steps: Steps, chunks: int, end: Step | None = None) -> list[Step]:
    """The answer broken off behind its n-th chunk, by a FIN unless `end` says how."""
    place = [i for i, step in enumerate(steps) if isinstance(step, Head | Chunk)][chunks] + 1
    return [*steps[:place], Close() if end is None else end]


def replay(capture: Capture, cuts: Callable[[bytes], Sequence[bytes]] | None = None) -> list[Step]:
    """A recorded answer on a connection that stays open, in the server's own chunks or in those that `cuts`
    makes of its body."""
    dropped = ("connection", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in capture.headers if name.lower() not in dropped]
    if not capture.times and not capture.is_stream:
        return whole(capture.body, capture.status, content_type=None, headers=headers)
    chunks = capture.chunks if cuts is None else cuts(capture.body)
    return [Head(capture.status, [*headers, _CHUNKED]), *(Chunk(c) for c in chunks if c), LastChunk()]


def _chunk_object(choices: list[dict[str, object]], model: str) -> dict[str, object]:
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": model,
        "choices": choices,
    }


def _usage(usage: tuple[int, int], cached: int | None = None) -> dict[str, object]:
    prompt, completion = usage
    counts: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
