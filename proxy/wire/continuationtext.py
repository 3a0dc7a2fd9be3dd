"""The rest of a broken answer, asked for by its text: the request again, with what the client has as the answer's beginning.

Rules
1. Only behind the thinking and before a tool call: what is text to the client is text to the model, and what is not
   would have to be written as the model writes it, which nobody knows from outside.
2. Blanks at the end of what the client has are not sent: templates strip them, and a model goes on badly behind them. Those
   of them that come again are skipped. A backend that repeats what it was given (`echoes`) is skipped over that, too.
3. All that comes is text, or calls: a parser that takes it for thinking, as the end of the thinking is not in it, is wrong.
4. Events carry what the first leg's carried. Usage is the last leg's, the answer's beginning counted as such: the sum is
   true, where it is split is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from proxy.wire.body import Kind, Scan, items
from proxy.wire.chatdelta import THOUGHTS, ChatShape
from proxy.wire.continuation import Said
from proxy.wire.continuationskip import Differs, Skip, reach_text
from proxy.wire.errors import Api
from proxy.wire.splice import Edit, apply, override
from proxy.wire.streams import ChatStream, CompletionsStream, MalformedStream
from proxy.wire.toolcalls import ToolEngine
from proxy.wire.toolstream import ToolChatStream, dumps

_OTHERWISE = (b"chat_template", b"add_generation_prompt", b"truncate_prompt_tokens", b"truncation_side")
"""Members that make another prompt of the beginning of an answer than was looked at, or cut it elsewhere."""
_LIMITS = (b"max_completion_tokens", b"max_tokens")
_TAGS = ("<think>", "</think>", "<tool_call", "<function=")


def not_text(api: Api, scan: Scan, said: Said) -> str | None:
    """Why the answer of this request cannot go on by text where it broke; None: it can."""
    if said.finished:
        return "finished"  # all came but the usage that the client asked for
    if said.calls:
        return "call"
    if any(tag in said.content for tag in _TAGS):
        return "tags"  # nobody took apart what the model wrote
    if said.content.endswith("\ufffd"):
        return "torn"
    for key in _OTHERWISE:
        if scan.raw(key) not in (None, b"null") and (key, scan.raw(key)) != (
            b"add_generation_prompt",
            b"true",
        ):
            return key.decode()
    if api is Api.CHAT:
        if not said.content.strip():
            return "thinking"
        return None if _last_role(scan) in ("user", "tool") else "messages"
    return None if scan.kind(b"prompt") is Kind.STRING else "prompt"


def _last_role(scan: Scan) -> object:
    raw = scan.raw(b"messages") or b""
    if scan.kind(b"messages") is not Kind.ARRAY or not (spans := items(raw, (0, len(raw)))):
        return None
    try:
        message = orjson.loads(raw[spans[-1][0] : spans[-1][1]])
    except orjson.JSONDecodeError:
        return None
    return message.get("role") if isinstance(message, dict) else None


def text_body(api: Api, scan: Scan, said: Said, left: int | None, go_on: dict[str, object]) -> bytes:
    """The continuing request: the client's own, as the backend gets it, with the answer's beginning. left: tokens that may
    come; None: no limit. go_on: members that say that the last message is one. Raises BodyError."""
    head = said.content.rstrip()
    edits: list[Edit] = []
    if api is Api.CHAT:
        message: dict[str, object] = {"role": "assistant", "content": head}
        if said.reasoning:
            message |= dict.fromkeys(THOUGHTS, said.reasoning)
        raw = (scan.raw(b"messages") or b"[]").rstrip()
        edits.append(Edit((b"messages",), raw[:-1] + b"," + dumps(message) + b"]"))
        edits += [override((key,), value) for key, value in go_on.items()]
    else:
        edits.append(override(("prompt",), (scan.get_str(b"prompt") or "") + head))
    if left is not None:
        keys = [key for key in _LIMITS if scan.raw(key) not in (None, b"null")]
        edits += [override((key.decode(),), left) for key in keys or [b"max_tokens"]]
    return apply(scan, edits)


def reach_blanks(had: str, again: str) -> int | None:
    """A `Reach` for blanks that the client has and that may come again, or others, or none."""
    same = next(
        (at for at, (some, other) in enumerate(zip(had, again, strict=False)) if some != other),
        min(len(had), len(again)),
    )
    return None if same == len(again) < len(had) else same


class Seam:
    """Where one leg goes on with what the client has."""

    def __init__(self, said: Said, generated: int, *, echoes: bool, shows_usage: bool) -> None:
        """generated: tokens of the answer so far. shows_usage: the client asked for usage."""
        head = said.content.rstrip()
        self._said = said
        self._generated = generated
        self._echoes = echoes
        self._shows_usage = shows_usage and not said.usage
        self._again = Skip(head if echoes else "", reach_text)
        self._thoughts = Skip(said.reasoning if echoes else "", reach_text)
        self._blanks = Skip(said.content[len(head) :], reach_blanks)

    def total(self, usage: dict[str, Any]) -> dict[str, int]:
        """Usage over all legs, from that of the last one."""
        prompt, own = (
            value if type(value := usage.get(key)) is int else 0
            for key in ("prompt_tokens", "completion_tokens")
        )
        generated = min(self._generated, prompt)
        return {
            "prompt_tokens": prompt - generated,
            "total_tokens": prompt + own,
            "completion_tokens": generated + own,
        }

    def usage(self, usage: dict[str, Any] | None) -> dict[str, Any] | None:
        """The event that tells it, where it is told. usage: over all legs."""
        if not self._shows_usage or not usage:
            return None
        return {**self._said.template, "choices": [], "usage": usage}

    def chunk(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        """A chunk of the leg as one of the client's stream; None: it has nothing new. Raises Differs."""
        choice = payload["choices"][0]
        given = choice.get("delta") or {}
        finish = choice.get("finish_reason")
        delta: dict[str, Any] = {"tool_calls": given["tool_calls"]} if given.get("tool_calls") else {}
        if text := self.text(self._thought(given) + (given.get("content") or ""), last=bool(finish or delta)):
            delta["content"] = text
        return self._told({"delta": delta}, finish) if delta or finish else None

    def completion(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        """The same of `/v1/completions`."""
        choice = payload["choices"][0]
        finish = choice.get("finish_reason")
        text = self.text(choice.get("text") or "", last=bool(finish))
        return self._told({"text": text, "logprobs": None}, finish) if text or finish else None

    def text(self, text: str, *, last: bool = False) -> str:
        """What the client lacks of a piece. last: no text follows."""
        news = self._blanks.feed(self._again.feed(text))
        if last and self._again.lacks:
            raise Differs("the answer ended before what the client has of it")
        return news

    def _thought(self, delta: dict[str, Any]) -> str:
        text = next((delta[key] for key in THOUGHTS if delta.get(key)), "")
        if not self._echoes or not text:
            return text  # see rule 3
        if self._thoughts.feed(text).strip():
            raise Differs("it thinks anew")
        return ""

    def _told(self, choice: dict[str, Any], finish: object) -> dict[str, Any]:
        return {**self._said.template, "choices": [{"index": 0, **choice, "finish_reason": finish}]}


class _Leg(ChatStream):
    """Tells what comes as events of the client's stream, with the usage of all legs."""

    __slots__ = ()
    _seam: Seam

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        keep, _ = super()._read(payload)
        if isinstance(usage := payload.get("usage"), dict):
            self.usage = self._seam.total(usage)
        return keep, False  # nothing is learned: every event is told anew

    def _forward(self, event: bytes, payload: dict[str, Any], keep: bool) -> bytes:
        if not keep:
            return b""
        try:
            told = self._told(payload) if payload.get("choices") else self._seam.usage(self.usage)
        except (Differs, TypeError, AttributeError) as differs:
            raise MalformedStream(str(differs)) from None
        return b"" if told is None else super()._forward(b"data: %b\n\n" % dumps(told), told, True)

    def _told(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        """What has choices, as the client lacks it."""
        raise NotImplementedError


class TextLeg(_Leg, ToolChatStream):
    """Reads the continuing chat request's answer; what it forwards goes on with the client's stream."""

    __slots__ = ("_seam",)

    def __init__(
        self, seam: Seam, new_engine: Callable[[bool], ToolEngine], thoughts: tuple[str, ...]
    ) -> None:
        super().__init__(new_engine, ChatShape(reasoning=thoughts))
        self._seam = seam

    def _told(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        return self._seam.chunk(payload)


class TextLegCompletion(_Leg, CompletionsStream):
    """The same for a client of `/v1/completions`."""

    __slots__ = ("_seam",)

    def __init__(self, seam: Seam) -> None:
        super().__init__()
        self._seam = seam

    def _told(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        return self._seam.completion(payload)
