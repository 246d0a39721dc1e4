"""Dead links in the built site: `python -m tests.tools.site build/site`; `make docs` runs it.

Every link and picture that stays on the site leads to a file, and where it names one, to a place in it. Every picture
has a description, and every heading that is none by its tag has a level.
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the places in it that others may link to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.places, self.bare = [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.places |= {known[name] for name in ("id", "name") if known.get(name)}
        self.links += [known[name] for name in ("href", "src") if known.get(name)]
        if tag == "img" and not known.get("alt"):
            self.bare.append(f"{known.get('src')} has no description")
        if known.get("role") == "heading" and not known.get("aria-level"):
            self.bare.append(f"a heading in <{tag}> has no aria-level")


def dead(folder):
    """One line for each link that leads nowhere, and each picture or heading that says too little."""
    page = cache(Page)
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder)
        yield from (f"{name}: {what}" for what in page(path).bare)
        for link in page(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name}: there is no {link}"
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).places:
                yield f"{name}: {parts.path} has no place {parts.fragment}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    lines = list(dead(folder))
    print(*lines, sep="\n", end="\n" * bool(lines))
    sys.exit(1 if lines or not (folder / "index.html").is_file() else 0)
