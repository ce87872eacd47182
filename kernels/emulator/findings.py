"""What a launch that went on has found, for its report: each pair of lines once, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kernels.emulator.binding import Failure
from kernels.emulator.diagnosis import LANE, RACE, Scene, error_for
from kernels.report import Finding

__all__ = ["described"]

_RACES = ("race between blocks", "race across warps", "race within a warp")
_OTHERS = ("unwritten shared memory", "missing lane")


def described(failures: Sequence[Failure], scene: Scene) -> tuple[Finding, ...]:
    """Several instructions of one line, and threads near and far, are one finding: the farthest."""
    grouped: dict[tuple[object, ...], list[tuple[int, Failure]]] = defaultdict(list)
    for failure in failures:
        grouped[_key(failure, scene)].append((_rank(failure), failure))
    found = [
        _finding(sorted(members, key=lambda member: member[0]), scene)
        for members in grouped.values()
    ]
    return tuple(finding for _, finding in sorted(found, key=lambda entry: entry[0]))


def _key(failure: Failure, scene: Scene) -> tuple[object, ...]:
    if failure.kind == LANE:
        return failure.kind, failure.line
    array = scene.regions[failure.region].name
    if failure.kind != RACE:
        return failure.kind, scene.number_at(failure.pc), array
    return failure.kind, array, *_lines(failure, scene)


def _lines(failure: Failure, scene: Scene) -> tuple[int, ...]:
    return tuple(sorted((scene.number_at(failure.pc), scene.number_at(failure.other_pc))))


def _rank(failure: Failure) -> int:
    if failure.kind == RACE:
        return int(failure.scope)
    return len(_RACES) + int(failure.kind == LANE)


def _finding(members: list[tuple[int, Failure]], scene: Scene) -> tuple[int, Finding]:
    rank, failure = members[0]
    same_value = all(member.same_value for _, member in members)
    failure.same_value = same_value
    race = failure.kind == RACE
    missing = failure.kind == LANE
    lines = _lines(failure, scene) if race else (failure.line or scene.number_at(failure.pc),)
    finding = Finding(
        kind=(*_RACES, *_OTHERS)[rank],
        lines=lines,
        array="" if missing else scene.regions[failure.region].name,
        same_value=race and same_value,
        text=str(error_for(failure, scene, 0.0)),
    )
    return rank, finding
