"""Versions stand in pyproject.toml alone, and every way to set up leads there."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENT: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
REQUIREMENTS = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
OTHERS = ("Makefile", "README.md", "CONTRIBUTING.md", "environment.yml", ".ci/run")


def test_environment_installs_the_project_through_pip() -> None:
    *conda, pip = ENVIRONMENT["dependencies"]
    assert pip == {"pip": ["-e ."]}
    assert "pip" in conda
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_environment_asks_for_the_same_python() -> None:
    (python,) = [d for d in ENVIRONMENT["dependencies"] if str(d).startswith("python")]
    assert python == "python" + PROJECT["project"]["requires-python"]


def test_no_package_comes_from_both_conda_and_pip() -> None:
    """Two builds of PyTorch bring two OpenMP runtimes; conda names it pytorch."""
    conda = {re.split(r"[<>=]", d)[0] for d in ENVIRONMENT["dependencies"] if isinstance(d, str)}
    assert conda.isdisjoint({r.name for r in REQUIREMENTS} | {"pytorch", "matplotlib-base"})


def test_torch_is_pinned_exactly() -> None:
    (torch,) = [r for r in REQUIREMENTS if r.name == "torch"]
    assert [s.operator for s in torch.specifier] == ["=="]


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_file_names_a_version(name: str) -> None:
    extra = PROJECT["project"]["optional-dependencies"]["test"]
    packages = "|".join(r.name for r in [*REQUIREMENTS, *map(Requirement, extra)])
    found = re.findall(rf"\b(?:{packages})\s*[=<>~!]=?=?\s*\d[\w.]*", (ROOT / name).read_text())
    assert found == []


def test_python_of_the_makefile_readme_and_tools_is_the_projects() -> None:
    minimum = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"Python {minimum}" in (ROOT / "README.md").read_text()
    assert f"< ({minimum.replace('.', ', ')})" in (ROOT / "Makefile").read_text()
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + minimum.replace(".", "")


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text()
    assert os.stat(script).st_mode & stat.S_IXUSR


def test_readme_has_every_wing_and_every_lesson() -> None:
    readme = (ROOT / "README.md").read_text()
    package = ROOT / "playbook_utils"
    wings = [f"{p.parent.name}/" for p in package.glob("*/__init__.py")]
    lessons = [p.name for p in (ROOT / "notebooks").glob("*.ipynb")]
    missing = [name for name in [*wings, *lessons] if name not in readme]
    assert missing == [], "README.md: file structure, course map"


def test_every_make_target_of_the_readme_exists() -> None:
    texts = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b(?=[`\s\n]|$)", texts)) - targets == set()
