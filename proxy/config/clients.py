"""The keys of the file that say who may do what: clients' keys, tenants, what they may use, and what it costs.

Rules: as in `sections`. A key and its tenant both have to allow what is asked; of what is a single value, the key's own
wins.
"""

from __future__ import annotations

from typing import Literal

from policies.limits import LimitKind, Quota
from proxy.config.policy import Section
from proxy.config.values import (
    Array,
    Count,
    CountOrNone,
    Digest,
    Factor,
    Moment,
    Money,
    Name,
    SecretRef,
    Tokens,
    Weight,
    Whole,
    moment,
)

ToolFormatName = Literal["openai", "xml", "json"]


class Allowed(Section):
    """Limits of one key, tenant or model. None: there is none."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Tokens | None = None
    concurrent_requests: Count | None = None
    tokens_per_day: Tokens | None = None
    tokens_per_month: Tokens | None = None
    cost_per_day: Money | None = None
    cost_per_month: Money | None = None

    @property
    def quota(self) -> Quota:
        return Quota(**{kind.value: getattr(self, kind) for kind in LimitKind})


class Price(Section):
    """Of a million tokens. cached: of those of the prompt that came from the cache; None: as the others."""

    prompt: Factor = 0.0
    cached: Factor | None = None
    completion: Factor = 0.0


class KeySettings(Section):
    """What a key may do, wherever it is kept. models, tiers: empty is all."""

    models: Array[Name] = ()
    tiers: Array[Name] = ()
    priority: Whole | None = None
    tool_format: ToolFormatName | None = None
    reserve_tokens: CountOrNone | None = None
    limits: Allowed = Allowed()


class Tenant(KeySettings):
    """What all keys of a tenant may do together. weight: its part of the fair share; None: its key's."""

    weight: Weight | None = None


class ApiKey(KeySettings):
    """One client; the key is compared by hash and never kept. priority: of its requests in the queue, the highest that they
    may ask for. weight: its tenant's part of the fair share."""

    name: Name
    key: SecretRef | None = None
    sha256: Digest | None = None
    tenant: Name | None = None
    weight: Weight = 1.0
    expires: Moment | None = None

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch."""
        return None if self.expires is None else moment(self.expires)

    @property
    def digest(self) -> str:
        """sha256 of the key, hex. A loaded configuration has one for every key (rule `key_forms`)."""
        return self.key.digest if self.key is not None else self.sha256 or ""

    @property
    def of_tenant(self) -> str:
        return self.tenant or self.name
