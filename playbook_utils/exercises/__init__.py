"""The exercises' tasks and checks, one module a topic: `exercises.data_parallelism`, ...

Each module holds constants of `playbook_utils.checks.Exercise`. A notebook imports one and ends
the exercise's cell with `check(RING_ALL_REDUCE, ring_all_reduce)`. Solutions and planted bugs
stand elsewhere: solutions in the notebook, bugs in the tests.
"""
