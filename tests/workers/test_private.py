"""A name that another project moved is told by name; no other module here uses one."""

from __future__ import annotations

import re
from pathlib import Path

import cloudpickle
import pytest

from playbook_utils.workers import private


def test_a_name_that_moved_is_told() -> None:
    expected = f"cloudpickle {cloudpickle.__version__} has no cloudpickle.cloudpickle._moved"
    with pytest.raises(ImportError, match=re.escape(expected)):
        private.find("cloudpickle.cloudpickle", "_moved")


def test_no_other_module_of_the_wing_uses_private_names() -> None:
    foreign = re.compile(r"torch\._(?!_|dynamo)\w+|cloudpickle\._\w+|cloudpickle\.cloudpickle")
    folder = Path(private.__file__).parent
    found = {
        path.name: names
        for path in folder.glob("*.py")
        if path.name != "private.py" and (names := foreign.findall(path.read_text()))
    }
    assert found == {"pickling.py": ["cloudpickle.cloudpickle"]}  # the name inside a pickle
