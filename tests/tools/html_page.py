"""A parser that checks an HTML page and collects what it contains."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """The content of a page: (tag, attributes) in order, and the text of each element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for k in self.open:
            self.elements[k][2].append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return [
            "".join(text) for name, attrs, text in self.elements if name == tag and attributes.items() <= attrs.items()
        ]

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attrs, _ in self.elements for key, value in attrs.items() if key == name]
