"""Text as it is stored, read back by somebody else's HTML parser."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from annotation.escape import shown_message, shown_text


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text, self.markup = "", []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.markup.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        self.markup.append((tag, []))

    def handle_comment(self, data: str) -> None:
        self.markup.append((data, []))

    def handle_decl(self, decl: str) -> None:
        self.markup.append((decl, []))

    def unknown_decl(self, data: str) -> None:
        self.markup.append((data, []))

    def handle_pi(self, data: str) -> None:
        self.markup.append((data, []))


@given(st.text(alphabet=st.one_of(st.sampled_from("<>&;!?/-#x0aA\"'="), st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_a_parser_reads_the_text_and_no_markup(text: str) -> None:
    reader = Reader()
    reader.feed(shown_text(text))
    reader.close()
    assert reader.markup == []
    assert reader.text == text


def test_by_hand() -> None:
    assert shown_text("if a < b && c > d: print('&amp;')") == "if a &lt; b &amp;&amp; c > d: print('&amp;amp;')"
    assert shown_text("a\r\nb\0") == "a&#13;\nb␀"
    assert shown_message("user", "<b>") == {"role": "user", "content": "&lt;b>"}
