"""Terminal output: width and NO_COLOR are respected, what is piped reads the same everywhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from k3fuse.rewriter import console
from k3fuse.rewriter.html import page
from k3fuse.rewriter.saved import SavedReport
from reports import full_size

_COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a terminal gets of the full-size report."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    report = console.report_text(SavedReport(full_size()))
    console.emit(["[red]a coloured line[/red]", *report], None)
    return terminal.getvalue()


def test_what_is_asked_for_ahead_is_one_line() -> None:
    """In text and on the page; a report from before the option has none."""
    document = full_size()
    parts = console.report_text(SavedReport(document))
    assert not any("L2 prefetch" in str(part) for part in parts)
    assert "L2 prefetch" not in page.page(document)
    for site, size in zip(document["sites"][1:], (100, 20), strict=False):
        site["prefetched_bytes"] = size
    line = "L2 prefetch: 2 sites ask for 120 bytes of later weights on a rank"
    assert line in console.report_text(SavedReport(document))
    text = page.page(document)
    assert text.count(line) == 1
    assert "100 bytes of later weights, on one rank" in text


@pytest.mark.parametrize("width", [60, 100])
def test_a_terminals_width_is_kept(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _ESCAPE.sub("", shown(monkeypatch, COLUMNS=str(width))).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert any("93" in line for line in lines)


def test_colour_where_a_terminal_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _COLOUR.search(shown(monkeypatch, COLUMNS="100"))


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, COLUMNS="100", NO_COLOR="1")
    assert not _COLOUR.search(text)
    assert "a coloured line" in text


def test_what_is_written_has_no_escapes_and_one_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for width in ("40", "200"):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setenv("FORCE_COLOR", "1")
        console.emit(console.report_text(SavedReport(full_size())), tmp_path / "out.txt")
        texts.append((tmp_path / "out.txt").read_text())
    assert texts[0] == texts[1]
    assert "\x1b" not in texts[0]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_live_line_in_a_terminal_and_silent_where_quiet(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        console, "Console",
        lambda **_: Console(file=written, force_terminal=terminal, width=80),
    )  # fmt: skip
    with console.progress(quiet=True) as say:
        say("match the sites")
    assert ("match the sites" in written.getvalue()) == terminal
    with console.progress(quiet=False) as say:
        say("edit")
    assert "edit" in written.getvalue()
