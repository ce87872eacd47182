"""Private names of PyTorch: each is asked for, so that one that moved is named."""

from __future__ import annotations

import pytest
import torch

from playbook_utils.measure import private
from playbook_utils.measure.tracker import _ModelTracker, _ShardedTracker


@pytest.mark.parametrize("name", private.NAMES)
def test_it_is_there(name: str) -> None:
    assert getattr(private, name) is not None


def test_one_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("torch.utils._pytree:moved", "torch.utils.moved:tree_leaves"):
        monkeypatch.setitem(private.NAMES, "tree_leaves", place)
        with pytest.raises(ImportError, match=f"{place} is not in this version of torch"):
            private.tree_leaves  # noqa: B018
    with pytest.raises(AttributeError, match="unknown"):
        private.unknown  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "_track",
        "_update_and_maybe_create_winfos",
        "_update_peak_stats",
        "_pre_fw_hook",
        "_post_fw_hook",
        "_pre_bw_hook",
        "_post_bw_hook",
        "_track_module_params_and_buffers",
    ],
)
def test_methods_of_torchs_memory_tracker_that_ours_changes_or_calls(name: str) -> None:
    assert callable(getattr(private.MemTracker, name))
    assert issubclass(_ModelTracker, private.MemTracker)
    assert issubclass(_ShardedTracker, private.FSDPMemTracker)


def test_attributes_of_torchs_memory_tracker() -> None:
    tracker = private.MemTracker()
    for name in ("_in_opt", "_mod_tracker", "_curr_mem_snap", "_ref_class", "_in_ac", "_ac_mod"):
        assert hasattr(tracker, name), name
    assert hasattr(tracker._mod_tracker, "is_bw") and hasattr(tracker, "memory_tracking")
    assert callable(private.FSDPMemTracker._fsdp_state_pre_forward)
    assert callable(private.FSDPMemTracker.reset_mod_stats)


def test_arguments_of_a_schema() -> None:
    *_, out = private.schema
    assert (out.name, out.is_out, out.alias_info.is_write) == ("out", True, True)


def test_views_lie_in_one_storage() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert private.storage_id(x) == private.storage_id(x.T[1:]) != private.storage_id(y)
    assert private.local_part(x) is x
