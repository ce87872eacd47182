"""`playbook doctor`: what works on this machine, what a missing piece costs, how to get it.

Left out: the looking itself (`playbook_utils.doctor`), which lesson 00 uses as well.

    playbook doctor
    playbook doctor --json
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict

from playbook_utils.doctor import Finding, diagnose

__all__ = ["DESCRIPTION", "add_arguments", "as_text", "run"]

DESCRIPTION = "Say what works on this machine. Exits with 1 only where no lesson could run."
_WIDTH = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("--json", action="store_true", help="print a list of findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    findings = diagnose()
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(as_text(findings))
    return int(any(finding.required and finding.status == "missing" for finding in findings))


def as_text(findings: list[Finding]) -> str:
    """One line a finding; under those that are not ok, what that costs and what to do."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.name:<{name_width}}  {finding.status:<7}  {finding.found}")
        indent = " " * (name_width + 11)
        for text in (finding.costs, finding.remedy):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    broken = ", ".join(f.name for f in findings if f.required and f.status == "missing")
    verdict = f"No lesson can run without {broken}." if broken else "The lessons run here."
    return "\n".join([*lines, "", verdict])
