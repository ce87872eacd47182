"""A .cu file compiled for the CPU, whose kernels can be launched."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.arguments import (
    MAX_SHARED_BYTES,
    MAX_STATIC_SHARED_BYTES,
    Arguments,
    Configuration,
    element_bytes,
    tensor_dtypes,
)
from kernels.described import described_variable, resolved
from kernels.emulator.binding import Counts, Failure, Launch, Region
from kernels.emulator.bounds import check_bounds
from kernels.emulator.branches import BranchFinder
from kernels.emulator.compile import compile_for_cpu
from kernels.emulator.diagnosis import Scene, error_for
from kernels.emulator.findings import described
from kernels.emulator.lines import LineFinder
from kernels.emulator.symbols import Symbol, read_symbols
from kernels.report import LineReport, Report, merged, summarise
from kernels.source import KernelSignature, Source

__all__ = ["EmulatedLibrary"]

_KINDS = (
    "global load",
    "global store",
    "shared load",
    "shared store",
    "global atomic",
    "shared atomic",
    "step",
)
# The order of a line's entries in a report.
_ORDER = (*_KINDS, "branch")
_MAX_SITES = 4096
# The array of include/cuda_runtime.h that all `extern __shared__` arrays are.
_DYNAMIC = "emulator_dynamic_shared"
# Signal handlers belong to the process: launches take turns.
_LAUNCHING = threading.Lock()


@dataclass(frozen=True)
class NamedRegion:
    """A region of memory, as it is called in the source."""

    name: str
    base: int
    size_bytes: int
    shared: bool
    writable: bool
    element_bytes: int
    guard: bool = False
    """Of the compiler, for initialising a shared array."""


class EmulatedLibrary:
    """Compiled on construction; see `kernels.emulator`."""

    def __init__(
        self,
        source: Source,
        expressions: Mapping[str, str],
        macros: Mapping[str, str],
        *,
        count: bool,
        timeout_s: float,
        races: str = "raise",
    ) -> None:
        self._source = source
        self._macros = macros
        self._listing = races == "list"
        self._counted = count
        self._timeout_s = timeout_s
        compiled = compile_for_cpu(source, expressions, macros, count)
        self._library = ctypes.CDLL(str(compiled.library))
        self.refused = compiled.refused
        self.signatures = {
            name: resolved(self._library, source.kernels[name])
            for name in expressions
            if name not in compiled.refused
        }
        own = {(s.symbol, s.kind) for s in read_symbols(compiled.kernel_object)}
        symbols = [s for s in read_symbols(compiled.library) if (s.symbol, s.kind) in own]
        self._variables = [s for s in symbols if s.kind != "function" and "ubsan" not in s.symbol]
        self._functions = [s for s in symbols if s.kind == "function" and ".cold" not in s.symbol]
        self._finder = LineFinder(compiled.library, compiled.source)
        self._branches = BranchFinder(compiled.library)
        self._texts = ["", *source.text.splitlines()]

    def launch(
        self, signature: KernelSignature, where: Configuration, arguments: Arguments
    ) -> Report:
        """Run the kernel on the whole grid.

        Raises:
            ValueError: it needs more shared memory than a GPU has, or has more threads in a block
                than its __launch_bounds__ allow.
            KernelError: a subclass that says what the kernel did wrong, and in which line.
            KeyboardInterrupt: it was interrupted.
        """
        self._check_shared(signature, where)
        check_bounds(self._source, self._macros, signature.name, where)
        with _LAUNCHING:
            regions = self._regions(signature, where, arguments)
            failure = Failure()
            launch = self._launch(signature, where, arguments, regions)
            self._library.emulator_launch(ctypes.byref(launch), ctypes.byref(failure))
            sites = self._sites()
            found = self._found()
        _, load_address = self._places()
        scene = Scene(self._source, signature.name, where, regions, load_address, self._finder)
        findings = described(found, scene) if self._listing else ()
        if failure.kind:
            error = error_for(failure, scene, self._timeout_s)
            raise type(error)("\n".join([str(error), *(f"found before: {f}" for f in findings)]))
        if not self._counted:
            return Report(signature.name, "cpu", where.grid, where.block, findings=findings)
        lines = self._line_reports(sites, regions, load_address)
        return summarise(signature.name, where.grid, where.block, lines, findings)

    def _check_shared(self, signature: KernelSignature, where: Configuration) -> None:
        """Arrays of the kernel itself; those of functions it calls are not told apart."""
        local = f"_ZZ{self._mangled(signature.name)}E"
        static = sum(
            v.size_bytes
            for v in self._variables
            if v.kind == "shared" and v.symbol.startswith(local)
        )
        if static > MAX_STATIC_SHARED_BYTES or static + where.shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(
                f"kernel {signature.name}: {static} bytes of static and {where.shared_bytes} of "
                f"dynamic shared memory; a GPU takes {MAX_STATIC_SHARED_BYTES} of static, and "
                f"{MAX_SHARED_BYTES} of both together"
            )

    def _mangled(self, kernel: str) -> str:
        """The kernel's name as it stands in those of its static variables (Itanium ABI)."""
        address = getattr(self._library, f"emulator_address_{kernel}")
        address.restype = ctypes.c_uint64
        offset = address() - self._places()[1]
        (symbol, *_) = [f.symbol for f in self._functions if f.offset == offset] or [kernel]
        return symbol[2:] if symbol.startswith("_Z") else f"{len(symbol)}{symbol}"

    def variable(self, name: str) -> torch.Tensor:
        """A `__constant__` or `__device__` variable, as a tensor in its own memory."""
        found = described_variable(self._library, self._source, name)
        place = getattr(self._library, f"emulator_variable_{self._source.symbols.index(name)}")
        place.restype = ctypes.c_void_p
        memory = (ctypes.c_char * found.size_bytes).from_address(place())
        return torch.frombuffer(memory, dtype=tensor_dtypes(found.type)[0])

    def _launch(
        self,
        signature: KernelSignature,
        where: Configuration,
        arguments: Arguments,
        regions: Sequence[NamedRegion],
    ) -> Launch:
        _, load_address = self._places()
        call = getattr(self._library, f"emulator_call_{signature.name}")
        return Launch(
            call=ctypes.cast(call, ctypes.c_void_p).value,
            arguments=ctypes.cast(arguments.pointers, ctypes.c_void_p).value,
            grid=where.grid,
            block=where.block,
            regions=(Region * max(1, len(regions)))(
                *(
                    Region(
                        r.base,
                        r.size_bytes,
                        2 if r.guard else r.shared,
                        r.writable,
                        r.element_bytes,
                    )
                    for r in regions
                )
            ),
            num_regions=len(regions),
            counting=self._counted,
            listing=self._listing,
            interruptible=threading.current_thread() is threading.main_thread(),
            timeout_s=self._timeout_s,
            code_begin=load_address + min(f.offset for f in self._functions),
            code_end=load_address + max(f.offset + f.size_bytes for f in self._functions),
        )

    def _places(self) -> tuple[int, int]:
        """Addresses of shared memory (as this thread of the process has it) and of the library."""
        shared_base, load_address = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.emulator_places(ctypes.byref(shared_base), ctypes.byref(load_address))
        return shared_base.value, load_address.value

    def _regions(
        self, signature: KernelSignature, where: Configuration, arguments: Arguments
    ) -> list[NamedRegion]:
        """The file's own variables first: an index below their number means the same each time."""
        shared_base, load_address = self._places()
        kind, dynamic = self._source.dynamic_array(signature.name)
        regions = [
            NamedRegion(
                name=dynamic if v.symbol == _DYNAMIC else v.name,
                base=v.offset + (shared_base if v.kind == "shared" else load_address),
                size_bytes=where.shared_bytes if v.symbol == _DYNAMIC else v.size_bytes,
                shared=v.kind == "shared",
                writable=True,
                element_bytes=self._element_bytes(v, kind),
                guard=v.symbol.startswith("_ZGV"),
            )
            for v in self._variables
        ]
        pairs = list(zip(signature.parameters, arguments.tensors, strict=True))
        written = [
            _storage(tensor)
            for parameter, tensor in pairs
            if tensor is not None and not parameter.const
        ]
        storages: list[NamedRegion] = []
        for parameter, tensor in pairs:
            if tensor is None:
                continue
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            overlaps = any(start < other_end and other < end for other, other_end in written)
            regions.append(
                NamedRegion(
                    parameter.name, start, tensor.nbytes, False, overlaps, tensor.element_size()
                )
            )
            # A view may point into the middle of its storage (a halo): legal, looked up last.
            begin, stop = _storage(tensor)
            if stop - begin > tensor.nbytes and begin not in [r.base for r in storages]:
                overlaps = any(begin < other_end and other < stop for other, other_end in written)
                name, element = f"{parameter.name}'s storage", tensor.element_size()
                storages.append(NamedRegion(name, begin, stop - begin, False, overlaps, element))
        return [*regions, *storages]

    def _element_bytes(self, variable: Symbol, dynamic_type: str) -> int:
        if variable.symbol == _DYNAMIC:
            return element_bytes(dynamic_type)
        return element_bytes(self._source.shared_types.get(variable.name, ""))

    def _sites(self) -> list[Counts]:
        if not self._counted:
            return []
        buffer = (Counts * _MAX_SITES)()
        number = self._library.emulator_counts(buffer, _MAX_SITES)
        return [site for site in buffer[:number] if site.requests]

    def _found(self) -> list[Failure]:
        if not self._listing:
            return []
        buffer = (Failure * _MAX_SITES)()
        return list(buffer[: self._library.emulator_findings(buffer, _MAX_SITES)])

    def _line_reports(
        self, sites: Sequence[Counts], regions: Sequence[NamedRegion], load_address: int
    ) -> tuple[LineReport, ...]:
        """One entry a line, kind and array."""
        found = []
        for site in sites:
            at, kind = site.pc - load_address, _KINDS[site.kind]
            array = regions[site.region].name if site.region >= 0 else ""
            found.append((at, _line_report(site, kind, array)))
            if site.divergent:
                at = self._branches.after(at)
                found.append((at, LineReport(kind="branch", divergent_branches=site.divergent)))
        places = self._finder.find(at for at, _ in found)
        grouped: dict[tuple[int, int, str], list[LineReport]] = defaultdict(list)
        for at, report in found:
            line = places[at]
            text = self._texts[line].strip() if line < len(self._texts) else ""
            report = replace(report, file=self._source.display_name, line=line, text=text)
            grouped[line, _ORDER.index(report.kind), report.array].append(report)
        return tuple(merged(grouped[key]) for key in sorted(grouped))


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Begin and end of the memory that the tensor is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _line_report(site: Counts, kind: str, array: str) -> LineReport:
    return LineReport(
        kind=kind,
        array=array,
        accesses=site.accesses,
        requests=site.requests,
        sectors=site.sectors,
        wavefronts=site.wavefronts,
        bank_conflicts=site.wavefronts - site.ideal_wavefronts,
        conflict_degree=site.conflict_degree,
        inactive_lanes=site.inactive_lanes,
        bytes=site.accesses * site.bytes,
    )
