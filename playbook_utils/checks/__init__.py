"""Right or wrong, and why: the equivalence harness and the checks of exercises.

    from playbook_utils.checks import assert_same_training, check, record_training

`recording` writes one training run down, `equivalence` holds the ranks' runs against that of one
process, `differences` finds the words for what differs, `exercise` checks a learner's answer.
"""

from playbook_utils.checks.equivalence import EquivalenceReport, assert_same_training
from playbook_utils.checks.exercise import (
    CheckResult,
    Exercise,
    check,
    expect_calls,
    expect_close,
    expect_equal,
)
from playbook_utils.checks.recording import StepRecord, TrainingRecord, record_training

__all__ = [
    "CheckResult", "EquivalenceReport", "Exercise", "StepRecord", "TrainingRecord",
    "assert_same_training", "check", "expect_calls", "expect_close", "expect_equal",
    "record_training",
]  # fmt: skip
