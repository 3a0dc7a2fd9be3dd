"""Pure decisions: no I/O, no clock, no randomness of their own. `now` and `rng` are arguments.

Other packages import these names from here.
"""

from policies.admission import Admission
from policies.breaker import BreakerParams, Health, HealthState, on_failure, on_probe, on_success
from policies.classic import RANKINGS, own_policy
from policies.estimate import PromptSizes, TokenRatio, estimate_prompt
from policies.filters import FILTERS, drop_reason
from policies.fleet import Fleet, Member
from policies.params import PolicyParams, RouterParams
from policies.retry import Failure, Retry, RetryParams, may_retry
from policies.router import Router
from policies.scorers import SCORERS
from policies.types import (
    LOAD_REASONS,
    BackendView,
    ChooseReason,
    ContextEstimate,
    Decision,
    Drop,
    DropReason,
    Forecast,
    Go,
    Polled,
    RequestFacts,
    Result,
    Score,
    Shed,
    ShedReason,
    Slo,
    Spill,
    Tier,
    Verdict,
    Wait,
)

__all__ = [
    "FILTERS",
    "LOAD_REASONS",
    "RANKINGS",
    "SCORERS",
    "Admission",
    "BackendView",
    "BreakerParams",
    "ChooseReason",
    "ContextEstimate",
    "Decision",
    "Drop",
    "DropReason",
    "Failure",
    "Fleet",
    "Forecast",
    "Go",
    "Health",
    "HealthState",
    "Member",
    "PolicyParams",
    "Polled",
    "PromptSizes",
    "RequestFacts",
    "Result",
    "Retry",
    "RetryParams",
    "Router",
    "RouterParams",
    "Score",
    "Shed",
    "ShedReason",
    "Slo",
    "Spill",
    "Tier",
    "TokenRatio",
    "Verdict",
    "Wait",
    "drop_reason",
    "estimate_prompt",
    "may_retry",
    "on_failure",
    "on_probe",
    "on_success",
    "own_policy",
]
