"""Pure decisions: no I/O, no clock, no randomness of their own. `now` and `rng` are arguments.

Other packages import these names from here.
"""

from policies.breaker import BreakerParams, Health, HealthState, on_failure, on_probe, on_success
from policies.estimate import PromptSizes, TokenRatio, estimate_prompt
from policies.filters import FILTERS, drop_reason
from policies.params import RouterParams
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
    RequestFacts,
    Score,
    Tier,
)

__all__ = [
    "FILTERS",
    "LOAD_REASONS",
    "SCORERS",
    "BackendView",
    "BreakerParams",
    "ChooseReason",
    "ContextEstimate",
    "Decision",
    "Drop",
    "DropReason",
    "Failure",
    "Health",
    "HealthState",
    "PromptSizes",
    "RequestFacts",
    "Retry",
    "RetryParams",
    "Router",
    "RouterParams",
    "Score",
    "Tier",
    "TokenRatio",
    "drop_reason",
    "estimate_prompt",
    "may_retry",
    "on_failure",
    "on_probe",
    "on_success",
]
