"""The chain of a prompt and the opening of its conversation: equal as far as the prompts are, and no further."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.errors import Api
from proxy.wire.prefix import LINK_BYTES, MAX_LINKS, Prefix, read_prefix
from proxy.wire.request import read_request

LONG = " ".join(f"word{n}" for n in range(3000))  # 6 links
Message = dict[str, Any]


def said(role: str, text: object) -> Message:
    return {"role": role, "content": text}


def prefix(messages: object, api: Api = Api.CHAT, model: str = "m", **more: object) -> Prefix:
    key = {Api.CHAT: "messages", Api.MESSAGES: "messages", Api.RESPONSES: "input", Api.COMPLETIONS: "prompt"}
    body = {"model": model, key.get(api, "input"): messages, **more}
    return read_prefix(read_request(api, json.dumps(body).encode()), model)


def common(one: Prefix, other: Prefix) -> int:
    shared = 0
    for a, b in zip(one.links, other.links, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def test_the_next_turn_keeps_every_link_and_the_opening() -> None:
    turns = [said("system", LONG), said("user", 'Say "hi" \\ and\nmore')]
    before = prefix(turns)
    assert len(before.links) == len(json.dumps(turns)[1:-1]) // LINK_BYTES > 3
    for n in range(12):
        turns += [said("assistant", f"answer {n} " + LONG[: 700 * n]), said("user", f'go on "{n}"')]
        after = prefix(turns)
        assert common(before, after) == len(before.links)
        assert after.opening == before.opening is not None
        before = after
    assert len(before.links) > 12


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=40)), max_size=6),
    st.integers(0, 3 * LINK_BYTES),
    st.text(max_size=40),
)
def test_a_grown_conversation_shares_all_of_the_shorter_one(
    turns: list[tuple[str, str]], pad: int, last: str
) -> None:
    messages = [said("user", "x" * pad), *(said(role, text) for role, text in turns)]
    one, other = prefix(messages), prefix([*messages, said("assistant", last)])
    assert other.links[: len(one.links)] == one.links
    assert other.opening == one.opening is not None


@pytest.mark.parametrize("at", [0, LINK_BYTES, 2 * LINK_BYTES + 7, 3 * LINK_BYTES - 1])
def test_a_changed_byte_ends_the_shared_part_at_its_link(at: int) -> None:
    text = "y" * (5 * LINK_BYTES)
    changed = text[:at] + "z" + text[at + 1 :]
    one, other = prefix(text, Api.COMPLETIONS), prefix(changed, Api.COMPLETIONS)
    assert len(one.links) == 5
    assert common(one, other) == at // LINK_BYTES
    assert not set(one.links[at // LINK_BYTES :]) & set(other.links)


def test_tools_come_before_the_messages_wherever_the_body_has_them() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    one = json.dumps({"model": "m", "tools": tools, "messages": [said("user", LONG)]}).encode()
    other = json.dumps({"messages": [said("user", LONG)], "model": "m", "tools": tools}).encode()
    first, second = (read_prefix(read_request(Api.CHAT, raw), "m") for raw in (one, other))
    assert first == second
    assert common(first, prefix([said("user", "other")], tools=tools)) == len(json.dumps(tools)) // LINK_BYTES
    assert common(first, prefix([said("user", LONG)])) == 0


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.RESPONSES, {"instructions": LONG, "input": [said("user", "a")]}),
        (Api.RESPONSES, {"instructions": LONG, "input": "a"}),
        (Api.MESSAGES, {"system": LONG, "messages": [said("user", "a")]}),
        (Api.MESSAGES, {"system": [{"type": "text", "text": LONG}], "messages": [said("user", "a")]}),
        (Api.COMPLETIONS, {"prompt": LONG}),
        (Api.COMPLETIONS, {"prompt": list(range(9000))}),
    ],
)
def test_every_endpoint_that_generates_has_a_chain(api: Api, body: dict[str, object]) -> None:
    found = read_prefix(read_request(api, json.dumps(body).encode()), "m")
    assert len(found.links) >= 5
    assert (found.opening is None) == (api is Api.COMPLETIONS)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": [LONG, LONG]}),
        (Api.OTHER, {"input": LONG}),
        (Api.CHAT, {"model": "m"}),
        (Api.CHAT, {"messages": None}),
        (Api.CHAT, {"messages": []}),
        (Api.CHAT, {"messages": [said("user", "short")]}),
    ],
)
def test_a_batch_or_a_short_prompt_has_none(api: Api, body: dict[str, object]) -> None:
    assert read_prefix(read_request(api, json.dumps(body).encode()), "m").links == ()


def test_other_models_and_other_salts_have_other_caches() -> None:
    one = prefix([said("user", LONG)])
    for other in (
        prefix([said("user", LONG)], model="n"),
        prefix([said("user", LONG)], cache_salt="s"),
    ):
        assert common(one, other) == 0
        assert other.opening != one.opening


@pytest.mark.parametrize("marked_at", ["system", "last"])
def test_cache_marks_that_move_between_turns_change_nothing(marked_at: str) -> None:
    def turn(count: int, marked: bool) -> Prefix:
        mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}} if marked else {}
        system = [{"type": "text", "text": LONG, **(mark if marked_at == "system" else {})}]
        messages = [said("user", [{"type": "text", "text": "go"}])]
        messages += [said("assistant", [{"type": "text", "text": LONG}]) for _ in range(count)]
        if marked_at == "last":
            messages[-1]["content"][0] = {**mark, **messages[-1]["content"][0]}
        return prefix(messages, Api.MESSAGES, system=system)

    assert turn(1, True) == turn(1, False)
    one, other = turn(1, True), turn(3, True)
    assert common(one, other) == len(one.links)
    assert one.opening == other.opening


def test_a_picture_changes_the_links_behind_it_and_fills_none() -> None:
    def with_picture(payload: str) -> Prefix:
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + payload}}
        return prefix([said("user", [{"type": "text", "text": LONG}, url, {"type": "text", "text": LONG}])])

    one, other = with_picture("A" * 40_000), with_picture("B" * 40_000)
    assert len(one.links) == len(other.links) < 2 * len(LONG) / LINK_BYTES + 1
    assert common(one, other) == len(LONG) // LINK_BYTES


def test_conversations_that_begin_differently_have_different_openings() -> None:
    system = said("system", LONG + '"quoted" \\')
    openings = {prefix([system, said("user", text)]).opening for text in ("a", "b", "a ", 'a"', "a\\")}
    assert len(openings) == 5
    contents_first = [{"content": LONG, "role": "system"}, {"content": "a", "role": "user"}]
    longer = [*contents_first, {"content": "b", "role": "assistant"}]
    assert prefix(contents_first).opening == prefix(longer).opening is not None
    assert prefix([system, {"content": "b", "role": "user"}]).opening != prefix(contents_first).opening


@pytest.mark.parametrize("length", [3000, 16_300, 16_384, 16_400, 50_000, 3_000_000])
def test_of_a_long_first_message_the_beginning_counts(length: int) -> None:
    text = 'a "quoted" line\n' * (length // 16)
    one, other = prefix([said("user", text + "x")]), prefix([said("user", text + "y")])
    longer = prefix([said("user", text + "x"), said("assistant", "b")])
    assert one.opening == longer.opening
    assert (one.opening == other.opening) == (length > 14_000)  # as JSON, an eighth longer
    assert one.opening != prefix([said("user", "y" + text)]).opening


def test_the_chain_is_bounded() -> None:
    assert len(prefix("x" * (MAX_LINKS + 9) * LINK_BYTES, Api.COMPLETIONS).links) == MAX_LINKS
