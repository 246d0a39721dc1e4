"""The site, by Sphinx: `make docs` builds it in build/site.

The pages are those that GitHub shows. What only the site needs is here: the order of pages, and where links lead that
leave this folder.
"""

import json
import re
import textwrap
from pathlib import Path

from klatsch.extras import VERSION

ROOT = Path(__file__).parents[1]

project, author, release = "klatsch", "The klatsch authors", VERSION
project_copyright = "The klatsch authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "markdown"}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # tables of results begin below their title
highlight_language = "text"
pygments_style = "default"
smartquotes_action = "D"  # dashes alone: quotes belong to code

default_role = "code"  # docstrings have backquotes around code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

nitpicky = True
nitpick_ignore_regex = [("py:(class|data|obj)", ".*")]  # types in signatures may be inner ones, or other libraries'

html_theme = "furo"
html_title = f"klatsch {VERSION}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True, "source_view_link": ""}
html_show_sphinx = html_copy_source = False

# The bar at the side; docs/index.md has the same pages in sentences.
NAVIGATION = {
    "Start": ["notebooks/first_steps.ipynb", "when-gossip", "gallery"],
    "Train": ["ranks", "watching", "cluster", "crew", "hosts", "frameworks", "slow-networks"],
    "Compare": [
        *("results/README", "simulation", "rules", "topologies", "studies"),
        *("images", "language", "schedule-free", "theory"),
    ],
    "Plan": ["planning", "clock", "notebooks/your_model.ipynb"],
    "Extend": ["own", "notebooks/your_rule.ipynb", "site/examples"],
    "Reference": ["api/index", "site/benchmarks", "site/changelog", "site/contributing", "site/security"],
}
# Pages whose text is in a file elsewhere.
ELSEWHERE = {
    "site/benchmarks": "benchmarks/README.md",
    "site/changelog": "CHANGELOG.md",
    "site/contributing": "CONTRIBUTING.md",
    "site/security": "SECURITY.md",
}
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".toml"))


def write(app, page, source):
    """The text of a page, with links that stay on the site."""
    text, folder = source[0], Path("docs", page).parent
    if page.startswith("notebooks/"):
        text = notebook(json.loads(text))
    if page in ELSEWHERE:
        text, folder = (ROOT / ELSEWHERE[page]).read_text(), Path(ELSEWHERE[page]).parent
    if page == "site/examples":
        shown = "\n## {0}\n\n```{{literalinclude}} ../../{1}\n:language: {2}\n```\n"
        text += "".join(shown.format(path.name, path.relative_to(ROOT), path.suffix[1:]) for path in EXAMPLES)
    if page == "index":
        text += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
            for caption, pages in NAVIGATION.items()
        )
    if page == "results/README":
        pages = sorted(path.stem for path in (ROOT / "docs/results").glob("*.md") if path.stem != "README")
        titles = (
            f"{name.removesuffix('-paper').replace('-', ' ')} <{name}>" for name in pages
        )  # as reproduce takes them
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(titles) + "\n```\n"
    source[0] = re.sub(r"\]\(([^)\s]+)\)", lambda link: f"]({leads_to(link[1], folder)})", text)


def leads_to(link, folder):
    """Where a link leads on the site, from a file in a folder of the repository."""
    path, hash_, anchor = link.partition("#")
    if not path or re.match(r"\w+:", path):
        return link
    target = (ROOT / folder / path).resolve().relative_to(ROOT)
    places = {name: page for page, name in ELSEWHERE.items()} | {"README.md": "index"}
    if str(target) in places:
        return f"/{places[str(target)]}.md{hash_}{anchor}"
    if target.parts[0] == "examples":
        return f"/site/examples.md#{target.name.replace('.', '')}" if target.suffix else "/site/examples.md"
    if target.parts[0] != "docs":  # a folder or a program of the repository
        return f"/site/contributing.md#{'the-rooms' if target.parts[0] == 'src' else 'working-on-klatsch'}"
    return f"/{target.relative_to('docs')}{hash_}{anchor}"


def notebook(content):
    """A notebook as Markdown."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="{output["metadata"]["alt"]}" src="data:image/png;base64,{picture}">')
            else:
                parts.append("```text\n" + "".join(output.get("text") or data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def mark_up(app, what, name, thing, options, lines):
    """Docstrings are plain text: say where code begins, and lead to the documents that they name."""
    text = re.sub(r"docs/([\w-]+)\.md", r":doc:`docs/\1.md </\1>`", "\n".join(lines))
    parts = re.split(r"\n\n(?=    )", text)
    for k, part in enumerate(parts[1:], 1):
        before = parts[k - 1].rpartition("\n")[2]
        if not before.startswith("    ") and not part.startswith("    >>>"):
            parts[k] = f"{'.. code-block:: python' if is_python(part) else '::'}\n\n{part}"
    lines[:] = "\n\n".join(parts).splitlines()


def is_python(part):
    """Whether an indented paragraph is a program, and not a formula."""
    block = re.match(r"(?:    .*\n?|\n)+", part)[0]
    try:
        compile(textwrap.dedent(block), "docstring", "exec")
    except SyntaxError:
        return False
    return True


def say_levels(app, page, template, context, doctree):
    """The captions of the bar at the side are headings for screen readers, which Sphinx gives no level."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app):
    """Called by Sphinx."""
    app.connect("html-page-context", say_levels, priority=900)  # after furo
    app.connect("source-read", write)
    app.connect("autodoc-process-docstring", mark_up, priority=100)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
