"""`python -m playbook_utils` is the `playbook` command, for where its script is not on the path."""

from playbook_utils.commands import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
