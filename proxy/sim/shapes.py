"""vLLM's bodies and events, as bytes.

Rules: pure. Keys, their order and which are null are those of recorded answers (tests/captures); what varies per
token is spliced between constant bytes, since thousands of streams pass here.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from proxy.sim.ask import Ask, Json
from proxy.sim.plan import Delta, Kind, Plan

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-3f49537e"
DONE = b"data: [DONE]\n\n"
_FINGERPRINT = b',"system_fingerprint":"%s"' % FINGERPRINT.encode()


@dataclass(slots=True)
class Counts:
    """Token counts of an answer so far. `block`: tokens of a cache block."""

    prompt: int
    cached: int = 0
    block: int = 784
    completion: int = 0
    reasoning: int = 0

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }

    @property
    def created(self) -> int:
        """Tokens that this prompt added to the prefix cache."""
        return max(0, self.prompt // self.block * self.block - self.cached)


def dumps(value: object) -> bytes:
    return orjson.dumps(value)


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class ChatEvents:
    """The events of one streamed chat answer. `calls` are ids by (choice, call)."""

    def __init__(self, ask: Ask, id: str, created: int, model: str, prompt_ids: list[int] | None) -> None:
        self._ask = ask
        self._id = id
        self._head = (
            b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (
                id.encode(),
                created,
                dumps(model),
            )
        )
        self._prompt_ids = dumps(prompt_ids)

    def role(self, index: int, counts: Counts) -> bytes:
        usage = self._usage(counts)
        return (
            self._head
            + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            % index
            + usage
            + b',"prompt_token_ids":%b,"prompt_text":null}\n\n' % self._prompt_ids
        )

    def delta(self, index: int, delta: Delta, call_id: str, counts: Counts) -> bytes:
        return self._event(index, _delta(delta, call_id), self._logprobs(delta), b"null", delta.ids, counts)

    def silent(self, index: int, ids: tuple[int, ...], counts: Counts) -> bytes:
        """Tokens that make no delta: told only to who wants the ids."""
        return self._event(index, b"{}", b"null", b"null", ids, counts)

    def end(
        self, index: int, plan: Plan, counts: Counts, last: Delta | None, call_id: str, ids: tuple[int, ...]
    ) -> bytes:
        """The last event of a choice: with its last delta if one came in the same step."""
        end = b'"%b","stop_reason":%b' % (plan.finish.encode(), dumps(plan.stop))
        if last is None:
            logprobs = self._logprobs(Delta(Kind.CONTENT, "<|im_end|>"))
            return self._event(index, b"{}", logprobs, end, ids, counts)
        return self._event(index, _delta(last, call_id), self._logprobs(last), end, last.ids, counts)

    def abort(self, index: int, counts: Counts) -> bytes:
        """What vLLM sends when it is told to stop: a clean-looking end."""
        return self._event(index, b"{}", b"null", b'"abort","stop_reason":null', (), counts)

    def usage(self, counts: Counts) -> bytes:
        usage = counts.usage()
        usage["prompt_tokens_details"] = {
            "cached_tokens": counts.cached,
            "created_cache_tokens": counts.created,
        }
        usage["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning}
        return self._head + b'],"usage":' + dumps(usage) + _FINGERPRINT + b"}\n\n"

    def _event(
        self, index: int, delta: bytes, logprobs: bytes, end: bytes, ids: tuple[int, ...], counts: Counts
    ) -> bytes:
        tokens = dumps(list(ids)) if self._ask.token_ids else b"null"
        return (
            self._head
            + b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"token_ids":%b}]'
            % (index, delta, logprobs, end, tokens)
            + self._usage(counts)
            + b"}\n\n"
        )

    def _usage(self, counts: Counts) -> bytes:
        if not self._ask.continuous or not self._ask.usage:
            return b""
        usage = counts.usage()
        usage["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning}
        return b',"usage":' + dumps(usage)

    def _logprobs(self, delta: Delta) -> bytes:
        if self._ask.logprobs is None or delta.kind not in (Kind.CONTENT, Kind.REASONING):
            return b"null"
        return dumps({"content": [_logprob(delta.text, self._ask.logprobs)]})


class TextEvents:
    """The events of one streamed completion."""

    def __init__(self, ask: Ask, id: str, created: int, model: str, prompt_ids: list[int] | None) -> None:
        self._ask = ask
        self._head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
            id.encode(),
            created,
            dumps(model),
        )
        self._prompt_ids = dumps(prompt_ids)

    def role(self, index: int, counts: Counts) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta, call_id: str, counts: Counts) -> bytes:
        return self._event(index, dumps(delta.text), b"null", b"null", delta.ids, counts)

    def silent(self, index: int, ids: tuple[int, ...], counts: Counts) -> bytes:
        return self._event(index, b'""', b"null", b"null", ids, counts)

    def end(
        self, index: int, plan: Plan, counts: Counts, last: Delta | None, call_id: str, ids: tuple[int, ...]
    ) -> bytes:
        text, ids = (last.text, last.ids) if last else ("", ids)
        return self._event(index, dumps(text), dumps(plan.finish), dumps(plan.stop), ids, counts)

    def abort(self, index: int, counts: Counts) -> bytes:
        return self._event(index, b'""', b'"abort"', b"null", (), counts)

    def usage(self, counts: Counts) -> bytes:
        usage = counts.usage()
        usage["prompt_tokens_details"] = {"cached_tokens": counts.cached}
        return self._head + b'],"usage":' + dumps(usage) + _FINGERPRINT + b"}\n\n"

    def _event(
        self, index: int, text: bytes, end: bytes, stop: bytes, ids: tuple[int, ...], counts: Counts
    ) -> bytes:
        first = counts.completion <= len(ids) and self._ask.token_ids
        tokens = dumps(list(ids)) if self._ask.token_ids else b"null"
        usage = b""
        if self._ask.continuous and self._ask.usage:
            usage = b',"usage":' + dumps(counts.usage())
        return (
            self._head
            + b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,'
            % (index, text, end, stop)
            + b'"prompt_token_ids":%b,"token_ids":%b}]' % (self._prompt_ids if first else b"null", tokens)
            + usage
            + b"}\n\n"
        )


def with_fingerprint(last: bytes) -> bytes:
    """Mark the last event before [DONE], as vLLM does when no usage event follows."""
    return last.removesuffix(b"}\n\n") + _FINGERPRINT + b"}\n\n"


def chat_body(
    id: str, created: int, model: str, choices: list[Json], counts: Counts, prompt_ids: list[int] | None
) -> bytes:
    return dumps(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **counts.usage(),
                "prompt_tokens_details": {
                    "cached_tokens": counts.cached,
                    "created_cache_tokens": counts.created,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
            },
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def chat_choice(
    ask: Ask, index: int, plan: Plan, finish: str, deltas: list[Delta], ids: list[int], call_ids: list[str]
) -> Json:
    """One choice of a whole answer, from all its deltas."""
    text = {
        kind: "".join(d.text for d in deltas if d.kind is kind) for kind in (Kind.CONTENT, Kind.REASONING)
    }
    names = [d for d in deltas if d.kind is Kind.NAME]
    calls = [
        {
            "id": call_ids[d.call],
            "type": "function",
            "function": {"name": d.text, "arguments": _arguments(deltas, d.call)},
        }
        for d in names
    ]
    empty = "" if ask.choice in ("named", "required") and calls else None
    message: Json = {
        "role": "assistant",
        "content": text[Kind.CONTENT] or empty,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **({"tool_calls": calls} if calls else {}),
        "reasoning": text[Kind.REASONING] or None,
    }
    logprobs = None
    if ask.logprobs is not None:
        shown = [d for d in deltas if d.kind in (Kind.CONTENT, Kind.REASONING)]
        logprobs = {"content": [_logprob(d.text, ask.logprobs) for d in shown]}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": plan.stop,
        "token_ids": ids if ask.token_ids else None,
        "routed_experts": None,
    }


def text_body(id: str, created: int, model: str, choices: list[Json], counts: Counts) -> bytes:
    return dumps(
        {
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **counts.usage(),
                "prompt_tokens_details": {
                    "cached_tokens": counts.cached,
                    "created_cache_tokens": None,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def text_choice(
    ask: Ask,
    index: int,
    plan: Plan,
    finish: str,
    deltas: list[Delta],
    ids: list[int],
    prompt_ids: list[int] | None,
) -> Json:
    return {
        "index": index,
        "text": "".join(d.text for d in deltas),
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": plan.stop,
        "token_ids": ids if ask.token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
        "routed_experts": None,
    }


def models(model: str, window: int, created: int) -> bytes:
    permission = {
        "id": "modelperm-97be3ca9c4df93c0",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": window,
        "permission": [permission],
    }
    return dumps({"object": "list", "data": [card]})


def _delta(delta: Delta, call_id: str) -> bytes:
    match delta.kind:
        case Kind.NAME:
            function = {"name": delta.text}
            if delta.arguments:
                function["arguments"] = delta.arguments
            call = {"id": call_id, "type": "function", "index": delta.call, "function": function}
            return b'{"tool_calls":[%b]}' % dumps(call)
        case Kind.ARGUMENTS:
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                delta.call,
                dumps(delta.text),
            )
    return b'{"%b":%b}' % (delta.kind.encode(), dumps(delta.text))


def _arguments(deltas: list[Delta], call: int) -> str:
    """Whole arguments; vLLM says {} where a streamed answer would have a torn string."""
    own = (d for d in deltas if d.call == call)
    text = "".join(d.text if d.kind is Kind.ARGUMENTS else d.arguments for d in own)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return "{}"
    return text


def _logprob(text: str, top: int) -> Json:
    one: Json = {"token": text, "logprob": 0.0, "bytes": list(text.encode())}
    tops: list[Json] = [one, {"token": "\n", "logprob": -40.5, "bytes": [10]}]
    return {**one, "top_logprobs": tops[:top]}
