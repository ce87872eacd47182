"""How every subcommand ends: also where its answer cannot be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from playbook_utils.commands import main

PLAYBOOK = "import sys; from playbook_utils.commands import main; sys.exit(main())"
FITS = ("memory", "--model", "llama-3.2-1b", "--gpu", "h200")
FULL = Path("/dev/full")


def start(*arguments: str, **streams: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PLAYBOOK, *arguments]
    # Buffered, as it is where nothing is said: then it is only a flush that fails.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, **streams)  # type: ignore[call-overload,no-any-return]


def test_a_reader_who_leaves_ends_it_quietly_as_a_signal_would() -> None:
    process = start(*FITS, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # long before anything is written
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_is_one_line_and_not_the_status_for_does_not_fit(more: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        process = start(*FITS, *more, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("playbook memory: ") and "No space left" in err and err.count("\n") == 1


def test_another_failure_leaves_the_callers_output_open(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr("playbook_utils.commands.memory.train", fail)
    assert main(list(FITS)) == 2
    print("still here")
    out, err = capfd.readouterr()
    assert out == "still here\n" and "Permission denied: 'config.json'" in err


def test_output_that_is_no_file_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    assert main(list(FITS)) == 0
    assert "Fits h200" in written.getvalue()


def test_the_command_reads_notebooks_without_a_grammar_of_urls() -> None:
    """jsonschema would build one at import, which takes longer than the rest of the start."""
    code = (
        "import sys\n"
        "from playbook_utils.commands import main\n"
        "assert main(['export', 'no lesson']) == 2\n"
        "import nbformat\n"
        "assert 'jsonschema' in sys.modules and 'lark' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
