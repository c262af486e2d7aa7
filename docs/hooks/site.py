"""What mkdocs does not do by itself. Links to files of the repository lead nowhere in a site and become
plain text, and a page that would load anything from elsewhere stops the build."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
ELSEWHERE = re.compile(r"\s*(https?:)?//")
IN_STYLE = re.compile(r"(?:@import\s+|url\()[\s\"']*((?:https?:)?//[^\s\"')]+)")


def on_page_markdown(text: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"`\1`", text)


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        url = dict(attributes).get(LOADS.get(tag, "")) or ""
        if ELSEWHERE.match(url):
            self.found.append(url)
        self.found += IN_STYLE.findall(dict(attributes).get("style") or "")
        if "mermaid" in (dict(attributes).get("class") or "").split():
            self.found.append("a diagram, whose script the theme loads from elsewhere")


def loaded_from_elsewhere(site: Path) -> list[str]:
    """FILE: URL, of all that the pages and styles of a site ask other servers for."""
    found = []
    for page in sorted(site.rglob("*.html")):
        parser = _Loaded()
        text = page.read_text(encoding="utf-8")
        parser.feed(text)
        parser.found += [
            u for style in re.findall(r"<style.*?</style>", text, re.S) for u in IN_STYLE.findall(style)
        ]
        found += [f"{page.relative_to(site)}: {url}" for url in parser.found]
    for style in sorted(site.rglob("*.css")):
        found += [
            f"{style.relative_to(site)}: {url}" for url in IN_STYLE.findall(style.read_text(encoding="utf-8"))
        ]
    return found


def on_post_build(config: Any, **_: Any) -> None:
    found = loaded_from_elsewhere(Path(config.site_dir))
    if found:
        raise PluginError("the site loads from elsewhere: " + "; ".join(found[:5]))
