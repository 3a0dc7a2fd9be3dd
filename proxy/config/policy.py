"""The keys that a policy is made of: tiers, and what ranks, predicts, admits and estimates.

Rules: as in `sections`. All of it can be changed while the gateway runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel

from policies import RetryParams, RouterParams, Slo, Spill, Tier, TokenRatio
from policies.hedge import HedgeParams
from policies.params import (
    AdmissionParams,
    PolicyParams,
    PredictParams,
    SpeculationParams,
    WorkingSetParams,
)
from policies.ranking import Ranking
from proxy.config.values import (
    STRICT,
    Bits,
    Factor,
    PolicyName,
    Seconds,
    Share,
    SourceFile,
    Tokens,
    parameters,
)


class Section(BaseModel):
    model_config = STRICT


class SloConfig(Section):
    """What a tier promises. To the first token: ttft_seconds (None: it promises nothing), and prefill_factor × the cold
    prefill of what is new."""

    ttft_seconds: Seconds | None = None
    prefill_factor: Factor = 1.5
    tpot_seconds: Seconds = 0.05


class HedgeConfig(Section):
    """A second attempt beside one that does not begin to answer. after: seconds; None: there is none."""

    after: Seconds | None = None
    factor: Factor = 2.0
    share: Share = 0.05


class TierConfig(Section):
    """A quality level, over mean KL in bits per position, and what it promises."""

    reference: bool = False
    max_kl_bits: Bits | None = None
    no_speculation: bool = False
    slo: SloConfig = SloConfig()
    spill: Literal["sooner", "full", "never"] = "sooner"
    last_resort: bool = False
    continuation: Literal["off", "exact", "text"] = "off"
    hedge: HedgeConfig = HedgeConfig()
    requires_gate: bool = False
    gate_max_age: Seconds | None = None

    @property
    def hedges(self) -> HedgeParams | None:
        hedge = self.hedge
        return None if hedge.after is None else HedgeParams(hedge.after, hedge.factor, hedge.share)

    def tier(self, name: str) -> Tier:
        slo = None
        if self.slo.ttft_seconds is not None:
            slo = Slo(self.slo.ttft_seconds, self.slo.prefill_factor, self.slo.tpot_seconds)
        return Tier(
            name,
            self.reference,
            self.max_kl_bits,
            self.no_speculation,
            slo,
            Spill(self.spill),
            self.last_resort,
            self.requires_gate,
            self.gate_max_age,
        )


BUILT_IN_TIERS: Mapping[str, TierConfig] = {
    "exact": TierConfig(reference=True),
    "balanced": TierConfig(),
    "fast": TierConfig(),
}


def with_built_in_tiers(value: object) -> object:
    """A table of the file changes only the keys it names of the built-in tier."""
    if not isinstance(value, dict):
        return value
    tiers: dict[str, object] = {name: tier.model_dump() for name, tier in BUILT_IN_TIERS.items()}
    for name, table in value.items():
        built_in = tiers.get(name)
        tiers[name] = (
            {**built_in, **table} if isinstance(built_in, dict) and isinstance(table, dict) else table
        )
    return tiers


class Policy(Section):
    """How requests are routed. The tables are the parameters of `policies`, under their own names. name: which policy
    ranks the backends; file: a policy of one's own, in its place."""

    default_tier: str = "balanced"
    output_reserve_tokens: Tokens = 1024
    name: PolicyName = "predicted"
    file: SourceFile | None = None
    admission: bool | None = None
    calibrate: bool = True
    router: Annotated[RouterParams, parameters(RouterParams)] = RouterParams()
    predict: Annotated[PredictParams, parameters(PredictParams)] = PredictParams()
    speculation: Annotated[SpeculationParams, parameters(SpeculationParams)] = SpeculationParams()
    working_set: Annotated[WorkingSetParams, parameters(WorkingSetParams)] = WorkingSetParams()
    gate: Annotated[AdmissionParams, parameters(AdmissionParams)] = AdmissionParams()
    tokens: Annotated[TokenRatio, parameters(TokenRatio)] = TokenRatio()
    retry: Annotated[RetryParams, parameters(RetryParams)] = RetryParams()

    @property
    def ranking(self) -> str | Ranking:
        """What the router ranks by."""
        return self.name if self.file is None else self.file.ranking

    def params(self, weights: tuple[tuple[str, float], ...]) -> PolicyParams:
        """Everything that decides, in one value. weights: of the tenants."""
        return PolicyParams(
            self.name if self.file is None else self.file.name,
            "" if self.file is None else self.file.text,
            self.admission,
            self.router,
            self.predict,
            self.speculation,
            self.working_set,
            replace(self.gate, weights=weights),
        )
