"""What a launch did: counts for the whole grid and for each line of the source.

    report = module.matmul_tiled[(16, 16), (16, 16)](a, b, c, 256, 256, 256)
    report.load_sectors, report.sectors_per_load_request
    for line in report.by_line: ...
    print(report.table())

A *request* is one memory instruction of one warp. Global memory is fetched in *sectors* of 32
bytes: a request costs as many as its lanes touch. Shared memory answers a request in one
*wavefront*, or in several when lanes want different words of one bank. A *step* is one basic block
(a piece of code without a branch) executed by one warp; lanes that do not take part in it are
inactive. On a GPU nothing is counted and all counts are None.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Finding", "LineReport", "Report"]

SECTOR_BYTES = 32
WARP_SIZE = 32


@dataclass(frozen=True)
class LineReport:
    """What one line of the source did to one array, or where it branched."""

    kind: str
    """"global load", "global store", "global atomic", the same for shared, "step", or "branch": a
    place where the lanes of a warp went different ways."""
    file: str = ""
    line: int = 0
    """0: not a line of the file itself."""
    text: str = ""
    """The line, without indentation."""
    array: str = ""
    """Name of the parameter or shared array; "" for a step or branch."""
    accesses: int = 0
    """By threads; for a step, times that a thread executed it."""
    requests: int = 0
    """By warps."""
    sectors: int = 0
    """Global memory: distinct sectors of 32 bytes, over all requests."""
    wavefronts: int = 0
    """Shared memory: passes over the banks, over all requests."""
    bank_conflicts: int = 0
    """Wavefronts more than without conflicts."""
    conflict_degree: int = 0
    """Most words that one bank had to deliver in one pass: 1 is free of conflicts."""
    inactive_lanes: int = 0
    """Lanes of the 32 that did not take part, over all requests (or steps)."""
    divergent_branches: int = 0
    """Times that the lanes of a warp went on to different places from here."""
    bytes: int = 0
    """Asked for by threads."""

    @property
    def bytes_moved(self) -> int:
        """Sectors times 32; 0 for shared memory."""
        return self.sectors * SECTOR_BYTES


@dataclass(frozen=True, repr=False)
class Finding:
    """A race or an undefined value of a launch that went on: `load(..., races="list")`."""

    kind: str
    """"race between blocks", "race across warps", "race within a warp", "unwritten shared memory"
    or "missing lane"."""
    lines: tuple[int, ...]
    """Of the source: the two of a race, in their order there; 0 where it is not known."""
    array: str
    """"" for a missing lane."""
    same_value: bool
    """Both threads of the race write the same value, each time that it was found."""
    text: str
    """What the error would say."""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Report:
    """One launch."""

    kernel: str
    device: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    global_loads: int | None = None
    """By threads."""
    global_stores: int | None = None
    global_atomics: int | None = None
    load_requests: int | None = None
    """By warps, of global memory."""
    store_requests: int | None = None
    load_sectors: int | None = None
    """Distinct sectors of 32 bytes of each request, summed."""
    store_sectors: int | None = None
    shared_loads: int | None = None
    shared_stores: int | None = None
    shared_atomics: int | None = None
    shared_requests: int | None = None
    shared_wavefronts: int | None = None
    bank_conflicts: int | None = None
    """Wavefronts more than without conflicts."""
    conflict_degree: int | None = None
    """The worst of all requests: 1 without conflicts, 32 at most; 0 without shared memory."""
    steps: int | None = None
    """Basic blocks executed by warps."""
    inactive_lanes: int | None = None
    """Lanes that did not take part in a step, summed over the steps."""
    divergent_branches: int | None = None
    """Times that the lanes of a warp went different ways."""
    bytes_loaded: int | None = None
    """From global memory, as asked for by threads."""
    bytes_stored: int | None = None
    bytes_moved: int | None = None
    """Sectors loaded, stored and changed by atomics, times 32."""
    by_line: tuple[LineReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    """With `races="list"`: the races, those between blocks first and those within a warp last, each
    pair of lines once; then loads of unwritten shared memory and shuffles from missing lanes."""

    def __repr__(self) -> str:
        where = f"{self.kernel}[{self.grid}, {self.block}] on {self.device}"
        counted = "" if self.bytes_moved is None else f", {self.bytes_moved:,} bytes moved"
        return f"<report of {where}{counted}, {len(self.findings)} findings: see help(Report)>"

    @property
    def races(self) -> tuple[Finding, ...]:
        """The findings that are races."""
        return tuple(finding for finding in self.findings if finding.kind.startswith("race"))

    @property
    def num_threads(self) -> int:
        """Of the whole grid."""
        grid, block = self.grid, self.block
        return grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2]

    @property
    def sectors_per_load_request(self) -> float | None:
        """4 for 32 neighbouring floats, 32 for floats far from each other, 1 for one address."""
        return _ratio(self.load_sectors, self.load_requests)

    @property
    def sectors_per_store_request(self) -> float | None:
        """The same for stores."""
        return _ratio(self.store_sectors, self.store_requests)

    @property
    def active_lanes(self) -> float | None:
        """Lanes that take part in a step, on average: 32 without divergence in full warps."""
        if self.steps is None or self.inactive_lanes is None:
            return None
        return WARP_SIZE - self.inactive_lanes / self.steps if self.steps else None

    def table(self) -> str:
        """Lines for a lesson: one for each line of the source that touches memory."""
        head = f"{self.kernel}: grid {_size(self.grid)}, block {_size(self.block)}"
        if self.global_loads is None:
            return f"{head}, on {self.device}: not counted"
        rows: list[tuple[str, ...]] = [
            ("line", "", "array", "accesses", "requests", "sectors", "wavefronts", "per request")
        ]
        rows += [_row(line) for line in self.by_line if line.kind not in ("step", "branch")]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        aligned = [
            "  ".join(
                cell.ljust(width) if i in (1, 2) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        found = [f"{len(self.findings)} findings, in report.findings"] if self.findings else []
        return "\n".join([head, *aligned, *found])


def summarise(
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    lines: tuple[LineReport, ...],
    findings: tuple[Finding, ...] = (),
) -> Report:
    """The report whose totals are the sums of `lines`."""

    def total(field: str, *kinds: str) -> int:
        return sum(int(getattr(line, field)) for line in lines if line.kind in kinds)

    shared = ("shared load", "shared store", "shared atomic")
    moved = sum(line.bytes_moved for line in lines)
    return Report(
        kernel=kernel,
        device="cpu",
        grid=grid,
        block=block,
        global_loads=total("accesses", "global load"),
        global_stores=total("accesses", "global store"),
        global_atomics=total("accesses", "global atomic"),
        load_requests=total("requests", "global load"),
        store_requests=total("requests", "global store"),
        load_sectors=total("sectors", "global load"),
        store_sectors=total("sectors", "global store"),
        shared_loads=total("accesses", "shared load"),
        shared_stores=total("accesses", "shared store"),
        shared_atomics=total("accesses", "shared atomic"),
        shared_requests=total("requests", *shared),
        shared_wavefronts=total("wavefronts", *shared),
        bank_conflicts=total("bank_conflicts", *shared),
        conflict_degree=max((line.conflict_degree for line in lines), default=0),
        steps=total("requests", "step"),
        inactive_lanes=total("inactive_lanes", "step"),
        divergent_branches=total("divergent_branches", "branch"),
        bytes_loaded=total("bytes", "global load"),
        bytes_stored=total("bytes", "global store"),
        bytes_moved=moved,
        by_line=lines,
        findings=findings,
    )


def merged(lines: list[LineReport]) -> LineReport:
    """Several instructions of one line, as one."""
    first = lines[0]
    values = {field.name: getattr(first, field.name) for field in fields(LineReport)}
    for field in fields(LineReport):
        if field.name != "line" and isinstance(values[field.name], int):
            numbers = [int(getattr(line, field.name)) for line in lines]
            worst = field.name == "conflict_degree"
            values[field.name] = max(numbers) if worst else sum(numbers)
    return LineReport(**values)


def _row(line: LineReport) -> tuple[str, ...]:
    shared = line.kind.startswith("shared")
    costs = line.wavefronts if shared else line.sectors
    return (
        str(line.line),
        line.kind,
        line.array,
        f"{line.accesses:,}",
        f"{line.requests:,}",
        "" if shared else f"{line.sectors:,}",
        f"{line.wavefronts:,}" if shared else "",
        f"{costs / line.requests:.2f}",
    )


def _ratio(number: int | None, of: int | None) -> float | None:
    return number / of if number is not None and of else None


def _size(dimensions: tuple[int, int, int]) -> str:
    used = 3 if dimensions[2] > 1 else 2 if dimensions[1] > 1 else 1
    return " x ".join(str(n) for n in dimensions[:used])
