"""Runs inside the server's environment: upstream's page, edited in the copy that it makes at every start.

Few edits, each for a reason that annotators would feel. One that finds nothing to edit stops the server: the page is another one then.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    suffix: str
    found: re.Pattern[str]
    becomes: str


OWN_STYLES = """
.text_field_component .text_field_component__copy-button { display: none }
.text_field_component .content-area, .chat .chat__bubble { tab-size: 4 }
"""
NO_REFRESH = '.replace(/<(?=meta)/gi,"&lt;")'
EDITS = (
    # Fonts of a third party, asked for on every page. In their place our own styles: the copy button would give a text as it is stored,
    # with `&lt;` for `<`, while what is selected and copied by hand is what is seen.
    Edit(".css", re.compile(r"(?:@import url\(https?:[^)]*\);)+"), OWN_STYLES),
    # After each digit the ranking waits 0.3 s for a second one, and whoever types "2 1 3" at a normal pace loses every other key. A second
    # digit makes sense from ten places on.
    Edit(".js", re.compile(r"(\w+)\.focusOnFirstQuestionOrItem\(\),\1\.reset\(\)\}\)\)\}\),300\)"),
         r"\1.focusOnFirstQuestionOrItem(),\1.reset()}))}),\1.ranking.slots.length>9?300:0)"),
    # Ctrl+S saves a draft, the button says; the ranking swallows it.
    Edit(".js", re.compile(r'isGlobalShortcut\((\w+)\)\{return"Tab"=='), r'isGlobalShortcut(\1){return \1.ctrlKey||\1.metaKey||"Tab"=='),
    # A text becomes part of the document. Scripts in it are stopped by the policy, but no policy stops a refresh that leads elsewhere.
    Edit(".js", re.compile(r"innerHTML:(\w+)\._s\(\1\.fieldText\)"), rf"innerHTML:\1._s(\1.fieldText){NO_REFRESH}"),
    Edit(".js", re.compile(r'"span",\{domProps:\{innerHTML:(\w+)\._s\((\w+)\)'),
         rf'"span",{{domProps:{{innerHTML:\1._s(\2){NO_REFRESH}'),
)


class PageChanged(RuntimeError):
    """The server does not start."""


def edit(static_folder: str) -> None:
    files = [file for file in Path(static_folder).rglob("*") if file.suffix in {change.suffix for change in EDITS}]
    missing = set(EDITS)
    for file in files:
        text = shipped = file.read_text(encoding="utf-8")
        for change in EDITS:
            if file.suffix == change.suffix:
                text, times = change.found.subn(change.becomes, text)
                missing -= {change} if times else set()
        if text != shipped:
            file.write_text(text, encoding="utf-8")
    if missing:
        raise PageChanged(f"Argilla's page has nothing like {', '.join(change.found.pattern for change in missing)}: its version differs "
                          "from the one in requirements.lock. Reinstall the server's environment with `annotation install`.")
