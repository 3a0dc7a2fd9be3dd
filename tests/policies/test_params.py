"""A policy's text and its hash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from policies import PolicyParams, RouterParams
from policies.params import AdmissionParams, PredictParams, SpeculationParams, WorkingSetParams


def test_equal_policies_have_one_hash_and_any_other_knob_another() -> None:
    assert PolicyParams().digest() == PolicyParams().digest()
    assert re.fullmatch("[0-9a-f]{12}", PolicyParams().digest())
    others = [
        PolicyParams(name="round_robin"),
        PolicyParams(source="def score(facts, backend): ..."),
        PolicyParams(admission=False),
        PolicyParams(router=RouterParams(kv_limit=0.9)),
        PolicyParams(predict=PredictParams(harm_weight=0.4)),
        PolicyParams(speculation=SpeculationParams(slow_answers=4)),
        PolicyParams(working_set=WorkingSetParams(kv_share=0.8)),
        PolicyParams(gate=AdmissionParams(weights=(("a", 2.0),))),
    ]
    digests = {params.digest() for params in [PolicyParams(), *others]}
    assert len(digests) == len(others) + 1


def test_only_predicted_admits_unless_told() -> None:
    assert PolicyParams().admits
    assert not PolicyParams(name="least_in_flight").admits
    assert replace(PolicyParams(name="least_in_flight"), admission=True).admits


@pytest.mark.parametrize(
    "make",
    [
        lambda: PredictParams(harm_weight=-1),
        lambda: PredictParams(usual_output=0),
        lambda: PredictParams(integrity_answers=0),
        lambda: SpeculationParams(acceptance_share=1),
        lambda: SpeculationParams(slow_ratio=1),
        lambda: SpeculationParams(least_drafts=0),
        lambda: WorkingSetParams(return_quantile=1),
        lambda: WorkingSetParams(decrease=1),
        lambda: WorkingSetParams(conversations=0),
        lambda: AdmissionParams(ahead_seconds=0),
        lambda: AdmissionParams(queue=0),
        lambda: AdmissionParams(weights=(("a", 0.0),)),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
