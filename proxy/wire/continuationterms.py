"""What a request allows: whether its answer can go on elsewhere after a break, and what the continuing request says.

Rules
1. Every field of a request is known here, or its answer is not continued: what a field does to sampling nobody can guess.
2. What depends on the tokens before the cut as generated ones (penalties, grammars, seeds, counts) does not survive it: to
   the engine that goes on they are prompt.
3. The continuing request is `/v1/completions` over the ids of prompt and answer so far. It repeats what shapes sampling,
   byte for byte, asks for raw text, and for its ids in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.wire.body import BodyError, Kind, Scan
from proxy.wire.errors import Api

_REPEATED = frozenset(
    b"temperature top_p top_k min_p logit_bias stop stop_token_ids include_stop_str_in_output ignore_eos"
    b" allowed_token_ids cache_salt priority session_id spaces_between_special_tokens user vllm_xargs".split()
)
"""Members that shape how each token is chosen, or say for whom: they go into the continuing request."""

_OF_THE_PROMPT = frozenset(
    b"messages prompt model stream stream_options max_tokens max_completion_tokens tools tool_choice functions"
    b" function_call chat_template chat_template_kwargs add_generation_prompt add_special_tokens documents"
    b" reasoning_effort reasoning thinking enable_thinking metadata store service_tier request_id prompt_cache_key"
    b" safety_identifier truncate_prompt_tokens truncation_side".split()
)
"""Members that are spent once the prompt's ids are there, or that the gateway answers for itself."""

_HARMLESS: Mapping[bytes, tuple[bytes, ...]] = {
    b"n": (b"1",),
    b"best_of": (b"1",),
    b"logprobs": (b"false",),
    b"top_logprobs": (b"0",),
    b"presence_penalty": (b"0", b"0.0"),
    b"frequency_penalty": (b"0", b"0.0"),
    b"repetition_penalty": (b"1", b"1.0"),
    b"length_penalty": (b"1", b"1.0"),
    b"min_tokens": (b"0",),
    b"use_beam_search": (b"false",),
    b"echo": (b"false",),
    b"continue_final_message": (b"false",),
    b"include_reasoning": (b"true",),
    b"parallel_tool_calls": (b"true",),  # false is seen to by a grammar
    b"return_token_ids": (b"false",),
    b"skip_special_tokens": (b"true",),
    b"watermarking": (b"false",),
    b"bad_words": (b"[]",),
    b"response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    b"suffix": (b'""',),
}
"""Members whose answers cannot be continued, but for these values. null always says nothing."""

_MEDIA = (b'"image', b'"video', b'"audio', b'"input_audio', b'"file', b'"input_image')
"""Keys and types of parts that become more than tokens."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request's answer is continued. limit: max_tokens as the client has it. stop: its stop strings.
    repeated: members of the continuing request, spliced from the client's. shows_usage: the client asked for usage."""

    limit: int | None
    stop: tuple[str, ...]
    repeated: bytes
    shows_usage: bool

    def cut_by_stop(self, text: str) -> bool:
        """A stop string may span the cut: its beginning is the end of `text`, and whoever goes on sees only the rest."""
        return any(text.endswith(stop[:size]) for stop in self.stop for size in range(1, len(stop)))

    def left(self, generated: int) -> int | None:
        """Tokens that may still come; None: no limit but the window."""
        return None if self.limit is None else self.limit - generated

    def body(
        self, model: str | None, prompt: Sequence[int], ids: Sequence[int], *, raw: bool = True
    ) -> bytes:
        """The continuing request. raw: special tokens are part of the text (for whoever parses it again)."""
        limit = self.left(len(ids))
        head: dict[str, Any] = {
            "prompt": [*prompt, *ids],
            "max_tokens": limit,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "skip_special_tokens": not raw,
        }
        if model is not None:
            head = {"model": model, **head}
        return orjson.dumps(head)[:-1] + self.repeated + b"}"


def read_terms(api: Api, scan: Scan, *, shows_usage: bool) -> Terms | str:
    """The terms of a request as it goes to a backend, or the reason why its answer cannot be continued: a field's name,
    `endpoint` or `media`."""
    if api not in (Api.CHAT, Api.COMPLETIONS):
        return "endpoint"
    repeated = []
    for key in scan.members:
        value = scan.raw(key)
        if value is None or value == b"null" or key in _OF_THE_PROMPT:
            continue
        if key in _REPEATED:
            repeated.append(b',"%b":%b' % (key, value))
        elif value not in _HARMLESS.get(key, ()):
            return key.decode("utf-8", "replace")[:64]
    if (name := next((name for name, unsafe in _UNSAFE.items() if unsafe(scan)), None)) is not None:
        return name
    if api is Api.CHAT:
        if any(scan.holds(b"messages", mark) for mark in _MEDIA):
            return "media"
    elif scan.kind(b"prompt") is Kind.ARRAY and not _is_ids(_decoded(scan.raw(b"prompt"))):
        return "prompt"  # a batch
    try:
        limit = scan.get_int(b"max_completion_tokens") if api is Api.CHAT else None
        limit = scan.get_int(b"max_tokens") if limit is None else limit
    except BodyError:
        return "max_tokens"
    if limit is None and api is Api.COMPLETIONS:
        limit = 16  # the API's own default
    return Terms(limit, _stops(scan), b"".join(repeated), shows_usage)


def _forces(scan: Scan) -> bool:
    """A choice that is seen to by a grammar."""
    value = scan.raw(b"tool_choice")
    return value not in (None, b"null", b'"auto"', b'"none"') or b"function_call" in scan.members


def _strict(scan: Scan) -> bool:
    """Tools whose arguments are seen to by a grammar."""
    if not scan.holds(b"tools", b'"strict"'):
        return False
    tools = _decoded(scan.raw(b"tools"))
    if not isinstance(tools, list):
        return True
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return any(isinstance(function, dict) and function.get("strict") for function in functions)


def _continuous(scan: Scan) -> bool:
    """Counts in every chunk: those of the second leg would begin anew."""
    if not scan.holds(b"stream_options", b'"continuous_usage_stats"'):
        return False
    options = _decoded(scan.raw(b"stream_options"))
    return not isinstance(options, dict) or bool(options.get("continuous_usage_stats"))


_UNSAFE: Mapping[str, Callable[[Scan], bool]] = {
    "tool_choice": _forces,
    "tools": _strict,
    "stream_options": _continuous,
}


def _stops(scan: Scan) -> tuple[str, ...]:
    value = _decoded(scan.raw(b"stop"))
    if isinstance(value, str):
        return (value,)
    return tuple(stop for stop in value if isinstance(stop, str)) if isinstance(value, list) else ()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _decoded(raw: bytes | None) -> Any:
    try:
        return None if raw is None else orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
