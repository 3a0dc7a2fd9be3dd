"""A prompt that is a chat prompt and the beginning of its answer: the model goes on, as any model would.

Rules: pure. The answer to a prompt is decided (`plan`), so what is left of it is known from the prompt alone. A beginning
that is not this model's own makes an ordinary answer. In a chat the server's parser of thinking sees no end of it, and
takes all that comes for thinking, as vLLM's does.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from proxy.sim.ask import Ask, Tool, steering
from proxy.sim.plan import Dialect, Kind, Piece, Plan, limited, plan
from proxy.sim.text import Tokenizer

_ANSWER = b"<|im_start|>assistant\n<think>\n"
_NO_THINKING = b"\n</think>\n\n"
_TOOLS = re.compile(rb"<\|im_start\|>system\n# Tools\n(.*?)<\|im_end\|>\n", re.DOTALL)
_USER = re.compile(rb"<\|im_start\|>user\n(.*?)<\|im_end\|>\n", re.DOTALL)
_ROLE = re.compile(rb"<\|im_start\|>(\w+)\n")


def resumed(ask: Ask, seed: int, room: int, tokenizer: Tokenizer, dialect: Dialect) -> Plan | None:
    """What is left of the answer that the prompt begins; None if it begins none of ours."""
    at = ask.prompt.rfind(_ANSWER) + len(_ANSWER)
    if at < len(_ANSWER):
        return None
    thinking = not ask.prompt.startswith(_NO_THINKING, at)
    at += 0 if thinking else len(_NO_THINKING)
    asked, begun = ask.prompt[:at], ask.prompt[at:]
    whole = plan(_chat(asked, thinking), 0, seed, 1 << 30, tokenizer, dialect)
    if not "".join(piece.text for piece in whole.pieces).encode().startswith(begun):
        return None
    rest = _behind(whole.pieces, len(begun), Kind.REASONING if ask.chat and thinking else Kind.CONTENT)
    return limited(rest, replace(ask, min_tokens=0), min(room, ask.max_tokens or room), tokenizer, "stop")


def _behind(pieces: tuple[Piece, ...], size: int, kind: Kind) -> list[Piece]:
    """What is left of the pieces behind `size` bytes, as raw text: the same tokens, as long as those before it were."""
    rest = []
    for piece in pieces:
        text = piece.text.encode()
        if len(text) > size:
            rest.append(Piece(kind, text[size:].decode("utf-8", "replace")))
        size = max(0, size - len(text))
    return rest


def _chat(prompt: bytes, thinking: bool) -> Ask:
    """What was asked, read back from the rendered prompt."""
    tools = _TOOLS.match(prompt)
    listed = json.loads(tools[1]) if tools else []
    functions = [tool.get("function", {}) for tool in listed]
    said = _USER.findall(prompt)
    roles = _ROLE.findall(prompt)
    return Ask(
        chat=True,
        prompt=prompt,
        max_tokens=None,
        tools=tuple(Tool(str(f.get("name")), f.get("parameters")) for f in functions),
        choice="auto" if listed else "none",
        answered=len(roles) > 1 and roles[-2] == b"tool",
        thinking=thinking,
        steer=steering(said[-1].decode("utf-8", "replace") if said else ""),
    )
