"""The structures of `runtime/interface.h`, for ctypes."""

from __future__ import annotations

import ctypes

__all__ = ["Counts", "Failure", "Launch", "Region"]


class Region(ctypes.Structure):
    """A piece of memory that the kernel may touch."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("shared", ctypes.c_int32),
        ("writable", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    """What is to be run."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("regions", ctypes.POINTER(Region)),
        ("num_regions", ctypes.c_int32),
        ("counting", ctypes.c_int32),
        ("interruptible", ctypes.c_int32),
        ("listing", ctypes.c_int32),
        ("timeout_s", ctypes.c_double),
        ("code_begin", ctypes.c_uint64),
        ("code_end", ctypes.c_uint64),
    )


class Failure(ctypes.Structure):
    """Why it ended early, or what was found."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("region", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("other_line", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("other_thread", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("address", ctypes.c_uint64),
        ("detail", ctypes.c_int64),
        ("write", ctypes.c_int32),
        ("other_write", ctypes.c_int32),
        ("other_block", ctypes.c_uint32 * 3),
        ("scope", ctypes.c_int32),
        ("same_value", ctypes.c_int32),
        ("text", ctypes.c_char_p),
    )


class Counts(ctypes.Structure):
    """What one instruction did to one region."""

    _fields_ = (
        ("pc", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("region", ctypes.c_int32),
        ("conflict_degree", ctypes.c_uint32),
        ("accesses", ctypes.c_uint64),
        ("requests", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("ideal_wavefronts", ctypes.c_uint64),
        ("inactive_lanes", ctypes.c_uint64),
        ("divergent", ctypes.c_uint64),
    )
