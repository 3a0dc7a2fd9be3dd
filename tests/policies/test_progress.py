"""What shows that a backend gets nowhere, and what only looks like it."""

from __future__ import annotations

import pytest

from policies.progress import ProgressParams, Signs, Stuck, stuck

PARAMS = ProgressParams(stuck_seconds=20.0, overdue_factor=4.0)


@pytest.mark.parametrize(
    ("signs", "sign", "why"),
    [
        (Signs(), None, "nothing runs"),
        (Signs(silent=20.0), None, "not yet"),
        (Signs(silent=20.1), Stuck.SILENT, "all streams are silent"),
        (Signs(silent=30.0, ahead=10.0), None, "a long prefill stops the others for so long"),
        (Signs(silent=30.1, ahead=10.0), Stuck.SILENT, "and no longer"),
        (Signs(flat=20.1), Stuck.FLAT, "it claims to run and counts nothing"),
        (Signs(flat=30.0, ahead=10.0), None, "prefill is not counted until it is done"),
        (Signs(silent=1.0, flat=300.0), None, "a stream that gets tokens refutes its counters"),
        (Signs(late=25.0, expected=5.0), None, "late, not far"),
        (Signs(late=26.0, expected=5.0), Stuck.OVERDUE, "five times the prediction, and 20 s"),
        (Signs(late=39.0, expected=10.0), None, "not four times"),
        (Signs(late=41.0, expected=10.0), Stuck.OVERDUE, "four times"),
        (Signs(late=300.0), None, "nothing measured to go by"),
        (Signs(silent=1.0, late=26.0, expected=5.0), Stuck.OVERDUE, "though others get tokens"),
    ],
)
def test_sign(signs: Signs, sign: Stuck | None, why: str) -> None:
    assert stuck(signs, PARAMS) is sign, why


def test_nobody_looks_when_told_not_to() -> None:
    assert (
        stuck(Signs(silent=9e9, flat=9e9, late=9e9, expected=1.0), ProgressParams(stuck_seconds=0.0)) is None
    )


@pytest.mark.parametrize("wrong", [{"stuck_seconds": -1.0}, {"overdue_factor": 0.9}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="or more"):
        ProgressParams(**wrong)
