"""Every link and every path on the pages leads somewhere, and the front page reaches every page."""

import re
from pathlib import Path

import pytest
from docs import PAGES, ROOMS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings.  "## Losses: `algorithm.loss`" -> losses-algorithmloss"""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link into the repository; the anchor may be empty."""
    targets = [link.partition("#") for link in LINK.findall(page.read_text()) if "://" not in link]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in targets]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_links_to_files_and_headings_that_exist(page):
    for file, anchor in links(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_names_paths_that_exist(page):
    for path in PATH.findall(page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_front_page_reaches_every_page_with_one_click():
    front = ROOT / "README.md"
    assert {file for file, _ in links(front)} >= {*PAGES} - {front}


def test_the_front_page_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert len(text.splitlines()) <= 140


def test_troubleshooting_quotes_messages_and_metrics_that_exist():
    page = (ROOT / "launch" / "tools" / "doctor" / "README.md").read_text()
    first_cells = "\n".join(re.findall(r"^\|([^|]+)\|", page, re.M))
    quoted = {
        text for text in re.findall(r"`([^`]+)`", first_cells) if "=" not in text
    }  # options have a test of their own
    quoted.remove("No space left on device")  # the operating system says so
    parts = {part.strip("✗ ") for text in quoted for part in re.split(r"…|<\w+>", text)}
    sources = [file for top in ("rlsys", "workers", "launch") for file in (ROOT / top).rglob("*.py")]
    code = "\n".join(file.read_text() for file in sources)
    assert len(parts) > 40
    assert {part for part in parts if part not in code} == set()
