"""What the recorded traffic would have met under a policy: modelled, in the simulator.

Rules: arrivals, lengths and conversations are the recorded ones; engines are those of the backends' profiles. A turn comes
when it was recorded, or when the one before it has been answered, if that is later. Of a prompt the recorded chain
tells what it shares with others; without one each turn of a conversation holds the ones before. Everything that comes out
is a model's, and two of them compare; neither is what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from policies import Member, PolicyParams, Router
from policies.engine import BLOCK_TOKENS
from policies.simulation import Conversation, Machine, Score, Served, Simulation, Traffic, Turn, judge, score
from policies.simulation.machines import Running
from policies.simulation.players import Live, Make
from policies.types import Tier
from proxy.config import Backend, Config
from proxy.replay.records import Recorded


class CannotModel(Exception):
    """Why there is nothing to simulate."""


def traffic(records: Sequence[Recorded], config: Config) -> Traffic:
    """The answered requests, by conversation. Others say nothing of their length, and are left out."""
    answered = [r for r in records if r.outcome == "ok" and (r.prompt_tokens or r.estimate)]
    if not answered:
        raise CannotModel("no request was answered")
    start = answered[0].at
    by_conversation: dict[str, list[Recorded]] = {}
    for number, record in enumerate(answered):
        by_conversation.setdefault(record.conversation or f"#{number}", []).append(record)
    conversations = []
    for name, turns in by_conversation.items():
        tier = _tier(config, turns[0].tier)
        made = _turns(name, turns, start)
        identity = None if name.startswith("#") else name
        conversations.append(
            Conversation(turns[0].at - start, made, tier, identity, turns[0].tenant, bias=_bias(turns))
        )
    conversations.sort(key=lambda conversation: conversation.start)
    return Traffic("records", tuple(conversations), max(1.0, answered[-1].at - start + 1.0))


def machines(config: Config) -> tuple[Machine, ...]:
    """The backends, as their profiles say."""
    missing = [b.name for b in config.backends if b.measured is None or b.measured.quality_only]
    if missing:
        raise CannotModel(f"without a profile there is no engine to simulate: {', '.join(missing)}")
    return tuple(
        Machine(backend.name, backend.measured or "", kv_tokens=backend.limits.kv_tokens)
        for backend in config.backends
    )


def run(found: Traffic, config: Config, seed: int = 0) -> Score:
    """The traffic under this configuration's policy."""
    return scored(turns(found, config, seed), found, config)


def turns(found: Traffic, config: Config, seed: int = 0) -> list[Served]:
    """What became of each."""
    return Simulation(machines(config), found, _player(config), Random(seed)).run()


def scored(served: Sequence[Served], found: Traffic, config: Config) -> Score:
    fleet = machines(config)
    return score(served, fleet, judge(fleet), found.warm_up, found.seconds)


def _player(config: Config) -> Make:
    """The gateway's own policy as configured, limits and all."""
    params = config.policy_params
    members = [_member(backend) for backend in config.backends]
    router = Router(params.router, config.policy.ranking)

    def make(running: Sequence[Running], rng: Random) -> Live:
        player = Live([one.machine for one in running], PolicyParams(), rng)
        player.fleet.configure(0.0, members, params)
        player.admission.configure(0.0, router, params)
        return player

    return make


def _member(backend: Backend) -> Member:
    profile = backend.measured
    assert profile is not None
    reference, kl_bits = backend.worth
    limits = backend.limits
    return Member(
        backend.name,
        profile,
        reference,
        kl_bits,
        limits.window_tokens or profile.window_tokens,
        limits.max_in_flight or profile.max_num_seqs,
        limits.kv_tokens or profile.kv_tokens,
        backend.speculates,
        backend.remote,
    )


def _tier(config: Config, name: str | None) -> Tier:
    tier = config.tier(name or config.policy.default_tier)
    if tier is None:
        raise CannotModel(f"a record has tier {name!r}, and the configuration has not")
    return tier


def _bias(turns: Sequence[Recorded]) -> float:
    """What the gateway believed a prompt to be, over what it was."""
    known = [r.estimate / r.prompt_tokens for r in turns if r.estimate and r.prompt_tokens]
    return sum(known) / len(known) if known else 1.0


def _turns(name: str, records: Sequence[Recorded], start: float) -> tuple[Turn, ...]:
    chains = _chains(name, records)
    turns: list[Turn] = []
    held, ended = 0, 0.0
    for record, chain in zip(records, chains, strict=True):
        prompt, output = _prompt(record), max(1, record.completion_tokens or 1)
        at = record.at - start
        facts = record.traces[-1].facts if record.traces else None
        turns.append(
            Turn(
                prompt,
                output,
                max(1, prompt - held) if prompt > held else prompt,
                max(0.0, at - ended) if turns else 0.0,
                chain,
                facts.output_tokens if facts is not None else output,
                record.tools,
                at if turns else 0.0,
            )
        )
        held = prompt + output
        took = (record.ttft or 0.0) + (record.tpot or 0.0) * (output - 1)
        ended = at + took
    return tuple(turns)


def _prompt(record: Recorded) -> int:
    return max(1, record.prompt_tokens or record.estimate or 1)


def _chains(name: str, records: Sequence[Recorded]) -> list[tuple[int, ...]]:
    """Hashes of each turn's blocks, prompt and answer: by the recorded chain as far as it goes; behind it, and where there
    is none, turns of one conversation hold each other."""
    chains = []
    for record in records:
        blocks = (_prompt(record) + (record.completion_tokens or 1)) // BLOCK_TOKENS + 1
        facts = record.traces[-1].facts if record.traces else None
        links = facts.prefix if facts is not None else ()
        link_tokens = facts.link_tokens if facts is not None else 0.0
        chain = []
        for block in range(blocks):
            link = int((block + 1) * BLOCK_TOKENS / link_tokens) if link_tokens else 0
            known = links[min(link, len(links)) - 1] if 0 < link <= len(links) else name
            chain.append(hash((known, block)))
        chains.append(tuple(chain))
    return chains
