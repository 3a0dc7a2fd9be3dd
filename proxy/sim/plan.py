"""What the model "will" say: the whole answer, decided before the first token.

Rules: pure and deterministic in (seed, prompt). The answer is a row of pieces; each is cut into tokens of its
own. `Cutter` gives the pieces' text token by token, never half a character, as the deltas that vLLM's parsers
would make of it. With a dialect that the server does not parse, calls stay raw text in the content.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from random import Random

from proxy.sim.ask import Ask, Tool
from proxy.sim.text import Tokenizer, example, prose


class Dialect(StrEnum):
    """How tool calls leave: parsed by the server, or as the model wrote them."""

    QWEN3_XML = "qwen3_xml"  # parsed
    HERMES = "hermes"  # JSON in <tool_call>, raw
    XML = "xml"  # <function=…><parameter=…>, raw


class Kind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    NAME = "name"  # the opening of a parsed call: its delta comes when the piece is whole
    ARGUMENTS = "arguments"
    HIDDEN = "hidden"  # tokens that make no delta


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` is what the tokens hold; `name` what a NAME piece tells; `call` its number."""

    kind: Kind
    text: str
    call: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens` counts the end token if the answer ends by itself (`whole`)."""

    pieces: tuple[Piece, ...]
    tokens: int
    whole: bool
    finish: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """`ids` are the tokens' ids; more than one delta of a step share them, the first has them. `arguments`: what
    came of them in the same step as the NAME."""

    kind: Kind
    text: str
    call: int = 0
    arguments: str = ""
    ids: tuple[int, ...] = ()


def plan(ask: Ask, choice: int, seed: int, room: int, tokenizer: Tokenizer, dialect: Dialect) -> Plan:
    """The answer number `choice`. `room`: tokens until the window is full."""
    digest = blake2b(ask.prompt, digest_size=8).hexdigest()
    rng = Random(f"{ask.seed if ask.seed is not None else seed}:{choice}:{digest}")
    limit = min(room, ask.max_tokens or room)
    size = int(ask.steer.get("tokens", rng.randrange(60, 260))) * tokenizer.width
    if ask.ignore_eos or ask.min_tokens:
        size = max(size, (limit if ask.ignore_eos else ask.min_tokens) * tokenizer.width)
    pieces = _thoughts(ask, rng, tokenizer.width)
    calls = _calls(ask, rng)
    if calls:
        pieces += _call_pieces(calls, dialect)
    else:
        lead = "\n\n" if pieces else ""
        pieces.append(Piece(Kind.CONTENT, lead + _content(ask, rng, size)))
    parsed = bool(calls) and dialect is Dialect.QWEN3_XML
    finish = "tool_calls" if parsed and ask.choice != "named" else "stop"
    return limited(pieces, ask, limit, tokenizer, finish)


def limited(pieces: list[Piece], ask: Ask, limit: int, tokenizer: Tokenizer, finish: str) -> Plan:
    """The answer as far as stop strings and `limit` tokens let it go."""
    pieces, stop = _stopped(pieces, ask.stop)
    tokens = sum(tokenizer.count(len(piece.text.encode())) for piece in pieces)
    whole = stop is None and not ask.ignore_eos and tokens < limit
    if tokens + whole > limit or (tokens == limit and stop is None):
        return Plan(tuple(pieces), limit, False, "length")
    return Plan(tuple(pieces), max(1, tokens + whole), whole, "stop" if stop else finish, stop)


def _thoughts(ask: Ask, rng: Random, width: int) -> list[Piece]:
    tokens = int(ask.steer.get("think", rng.randrange(8, 40)))
    if not ask.thinking or not tokens:
        return []
    return [
        Piece(Kind.REASONING, prose(rng, max(1, tokens * width - 1)) + "\n"),
        Piece(Kind.HIDDEN, "</think>"),
    ]


def _content(ask: Ask, rng: Random, size: int) -> str:
    if ask.schema is not None:
        return json.dumps(example(ask.schema, rng))
    if "text" in ask.steer:
        return ask.steer["text"].replace("_", " ")
    return prose(rng, size)


def _calls(ask: Ask, rng: Random) -> list[tuple[str, object]]:
    """(name, arguments) of each call."""
    if not ask.tools or ask.choice == "none" or (ask.choice == "auto" and ask.answered):
        return []
    count = int(ask.steer.get("calls", 1))
    if ask.choice != "auto":
        count = max(1, count)
    named = [tool for tool in ask.tools if tool.name == ask.named] or list(ask.tools)
    tools: list[Tool] = [named[i % len(named)] for i in range(count)]
    return [(tool.name, example(tool.schema, rng)) for tool in tools]


def _call_pieces(calls: list[tuple[str, object]], dialect: Dialect) -> list[Piece]:
    if dialect is Dialect.HERMES:
        return [
            Piece(Kind.CONTENT, f"\n\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>")
            for n, a in calls
        ]
    if dialect is Dialect.XML:
        return [Piece(Kind.CONTENT, f"\n\n{as_xml(name, arguments)}") for name, arguments in calls]
    pieces = []
    for i, (name, arguments) in enumerate(calls):
        pieces += [
            Piece(Kind.NAME, f"<tool_call>\n<function={name}>\n", i, name),
            Piece(Kind.ARGUMENTS, json.dumps(arguments, ensure_ascii=False), i),
            Piece(Kind.HIDDEN, "\n</function>\n</tool_call>"),
        ]
    return pieces


def as_xml(name: str, arguments: object) -> str:
    """A call as the model writes it."""
    values = arguments.items() if isinstance(arguments, dict) else ()
    inner = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in values
    )
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _stopped(pieces: list[Piece], stops: tuple[str, ...]) -> tuple[list[Piece], str | None]:
    """Cut at the first stop string of visible text."""
    for i, piece in enumerate(pieces):
        found = [(piece.text.find(s), s) for s in stops if s and s in piece.text]
        if found and piece.kind in (Kind.CONTENT, Kind.REASONING):
            at, stop = min(found)
            return [*pieces[:i], replace(piece, text=piece.text[:at])], stop
    return pieces, None


class Cutter:
    """Gives a plan's tokens as deltas; with `ids`, their ids too."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, *, ids: bool) -> None:
        self._ids = ids
        self._pieces = [(piece, piece.text.encode()) for piece in plan.pieces]
        self._tokenizer = tokenizer
        self._piece = 0
        self._at = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.taken = 0
        self.reasoning = 0
        self.left = plan.tokens
        self.loose: tuple[int, ...] = ()
        self._whole = plan.whole

    def take(self, n: int) -> list[Delta]:
        """The next `n` tokens. Deltas of no text are left out; the first delta has all the ids, and `loose` has
        them when there is none."""
        n = min(n, self.left)
        self.left -= n
        self.taken += n
        deltas: list[Delta] = []
        ids: list[int] = []
        width = self._tokenizer.width
        while n and self._piece < len(self._pieces):
            piece, data = self._pieces[self._piece]
            count = min(n, self._tokenizer.count(len(data) - self._at))
            part = data[self._at : self._at + count * width]
            if self._ids:
                ids += self._tokenizer.encode(part)
            self._at += len(part)
            n -= count
            ended = self._at >= len(data)
            if piece.kind is Kind.REASONING:
                self.reasoning += count
            text = self._text(piece, part, ended)
            named = deltas[-1] if deltas and deltas[-1].kind is Kind.NAME else None
            if text and named is not None and piece.kind is Kind.ARGUMENTS and named.call == piece.call:
                deltas[-1] = replace(named, arguments=text)
            elif text:
                deltas.append(Delta(piece.kind, text, piece.call))
            if ended:
                self._piece += 1
                self._at = 0
                self._decoder.reset()
        if n and self._whole and self._ids:
            ids.append(self._tokenizer.end_id())
        self.loose = () if deltas else tuple(ids)
        if deltas and ids:
            deltas[0] = replace(deltas[0], ids=tuple(ids))
        return deltas

    def _text(self, piece: Piece, part: bytes, ended: bool) -> str:
        if piece.kind is Kind.HIDDEN:
            return ""
        if piece.kind is Kind.NAME:
            return piece.name if ended else ""
        return self._decoder.decode(part, ended)
