"""What a policy may know of a simulated turn: what the live gateway would know of the same request.

Rules: true lengths, true block hashes' sizes and the future stay behind. The prompt is believed to hold `bias` times
its true tokens; of the answer only the client's limit is known.
"""

from __future__ import annotations

from policies.simulation.values import Conversation, Turn
from policies.types import ContextEstimate, RequestFacts

MODEL = "model"
LOW, HIGH = 0.4, 4.0
"""Bounds of a prompt's tokens, as shares of what is believed: about those of a text of 3.6 bytes a token."""


def facts_of(conversation: Conversation, turn: Turn, block_tokens: int) -> RequestFacts:
    """The request as it arrives."""
    believed = max(1, round(turn.prompt * conversation.bias))
    return RequestFacts(
        MODEL,
        conversation.tier,
        ContextEstimate(believed, int(believed * LOW), int(believed * HIGH)),
        turn.allowed,
        session=conversation.identity,
        tools=turn.tools,
        stream=True,
        prefix=turn.chain[: turn.prompt // block_tokens],
        link_tokens=block_tokens * conversation.bias,
        conversation=conversation.identity or conversation.opening,
        priority=conversation.priority,
        share=conversation.tenant,
    )
