from __future__ import annotations

import json
from typing import Any

import pytest

from playbook_utils.commands import doctor as command
from playbook_utils.commands import main
from playbook_utils.doctor import Finding
from playbook_utils.doctor import Finding as F


def test_text_says_what_a_missing_piece_costs_and_how_to_get_it() -> None:
    findings = [
        F("torch", "ok", "2.x", required=True),
        F("nvcc", "missing", "none", "Cost.", "Cure."),
    ]
    assert command.as_text(findings).splitlines() == [
        "torch  ok       2.x",
        "nvcc   missing  none",
        "                Cost.",
        "                Cure.",
        "",
        "The lessons run here.",
    ]


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (F("gloo", "missing", "none", required=True), 1),
        (F("gloo", "ok", "works", required=True), 0),
        (F("nvcc", "missing", "none"), 0),
    ],
)
def test_exit_status_is_about_what_lessons_cannot_do_without(
    finding: Finding, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda: [finding])
    assert main(["doctor"]) == status
    assert ("can run without gloo" in capsys.readouterr().out) == bool(status)
    assert main(["doctor", "--json"]) == status
    assert json.loads(capsys.readouterr().out)[0]["name"] == finding.name
