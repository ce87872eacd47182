"""Links of the lessons and of the pages beside them, checked without a network.

A file that is linked to exists, and so does the heading. A lesson's link to the glossary names an
entry, and the entry links back to the lesson that explains it first. What lies on the web stands in
`notebooks/references.md` once, with the lessons that cite it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.notebooks.form import OLD_FORM

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
PAGES = [*sorted(NOTEBOOKS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+(?:\([^)]*\)[^)\s]*)*)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def text_of(path: Path) -> str:
    """The words of a page or a lesson, code left out."""
    if path.suffix == ".md":
        return _CODE.sub("", path.read_text(encoding="utf-8"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return _CODE.sub("", "\n\n".join(texts))


def links(path: Path) -> list[str]:
    return [target for _, target in _LINK.findall(text_of(path))]


def anchors(path: Path) -> set[str]:
    """GitHub's and JupyterLab's ids of a page's headings, which agree for lower-case words."""
    return {heading.lower().replace(" ", "-") for heading in _HEADING.findall(text_of(path))}


def broken(path: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for target in links(path):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists():
            found.append(f"{target}: there is no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            found.append(f"{target}: there is no such heading")
    return found


def entries() -> dict[str, list[str]]:
    """{term: lessons that its glossary entry links to}."""
    parts = re.split(r"^## +(.+?) *$", text_of(NOTEBOOKS / "glossary.md"), flags=re.MULTILINE)[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    return {
        term: [to for _, to in _LINK.findall(body) if to.endswith(".ipynb")] for term, body in named
    }


@pytest.mark.parametrize("path", [*LESSONS, *PAGES], ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](other.md) [y](page.md#c) [z](#a-b) [w](page.md#a-b)\n")
    assert broken(page) == [
        "other.md: there is no such file",
        "page.md#c: there is no such heading",
    ]


def test_the_glossary_and_the_lessons_link_to_each_other() -> None:
    terms = entries()
    assert terms
    assert list(terms) == sorted(terms), "in the order of the alphabet"
    for term, lessons in terms.items():
        assert len(lessons) == 1, f"{term!r} names the one lesson that explains it first"
        anchor = f"glossary.md#{term.replace(' ', '-')}"
        assert anchor in links(NOTEBOOKS / lessons[0]), f"{lessons[0]} does not link to {anchor}"


def test_what_lies_on_the_web_is_in_the_list_of_references() -> None:
    lines = text_of(NOTEBOOKS / "references.md").splitlines()
    listed = {}
    for line in (line for line in lines if line.startswith("- ")):
        targets = [target for _, target in _LINK.findall(line)]
        (address,) = [target for target in targets if target.startswith("http")]
        assert address not in listed, f"{address} is listed twice"
        listed[address] = {target for target in targets if target.endswith(".ipynb")}
    cited: dict[str, set[str]] = {}
    for lesson in LESSONS:
        for target in links(lesson):
            if target.startswith("http"):
                cited.setdefault(target, set()).add(lesson.name)
    assert {address: names for address, names in listed.items() if names} == cited
    assert [address for address, names in listed.items() if not names] == []


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_addresses_are_well_formed(path: Path) -> None:
    for target in links(path):
        if target.startswith("http"):
            assert target.startswith("https://"), target
        if "arxiv.org" in target:
            assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{4,5}", target), target
        if "ultrascale-playbook" in target:
            slug = target.partition("?section=")[2]
            assert slug == slug.lower() and " " not in slug, target


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_links_to_its_sources(path: Path) -> None:
    """What it names by number or as the book's section is a link."""
    if path.name[:2] in OLD_FORM:
        pytest.skip("not rewritten yet")
    assert "ultrascale-playbook?section=" in text_of(path)
    plain = _LINK.sub("", text_of(path))
    there = {lesson.name[:2] for lesson in LESSONS}
    assert [n for n in re.findall(r"[Ll]essons? (\d\d)\b", plain) if n in there] == []
