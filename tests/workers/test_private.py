"""A private name that another project moved is told by name; no other module here uses one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import cloudpickle.cloudpickle
import pytest

from playbook_utils.workers import private


def test_a_name_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("private_again", private.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.delattr(cloudpickle.cloudpickle, "_code_reduce")
    with pytest.raises(ImportError, match=r"_code_reduce.*cloudpickle"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_no_other_module_of_the_wing_uses_private_names() -> None:
    foreign = re.compile(r"torch\._(?!_|dynamo)\w+|cloudpickle\._\w+|cloudpickle\.cloudpickle")
    folder = Path(private.__file__).parent
    found = {
        path.name: names
        for path in folder.glob("*.py")
        if path.name != "private.py" and (names := foreign.findall(path.read_text()))
    }
    assert found == {"pickling.py": ["cloudpickle.cloudpickle"]}  # the name inside a pickle
