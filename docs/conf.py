"""How Sphinx builds the site. `make docs` writes it to build/docs, without a network."""

import os
import re
import sys
from importlib.metadata import version as version_of
from inspect import ismodule
from pathlib import Path

from sphinx.directives.code import CodeBlock

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # The pages are the same on every machine.
sys.path.insert(0, str(Path(__file__).parent))

from commands import commands_in_markdown
from public_names import public_names

from phalanx._src.tools import cli

project = "Phalanx"
author = "The Phalanx developers"
copyright = "The Phalanx developers. Apache-2.0"
version = release = version_of("phalanx")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "index"
myst_heading_anchors = 4
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
maximum_signature_line_length = 120
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# The button of a terminal copies the commands after "$ ", and not what they print. Blocks of output have none.
copybutton_prompt_text = "$ "
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

html_theme = "furo"
pygments_dark_style = (
    "github-dark-colorblind"  # Others underline the names of modules, like links.
)
html_title = f"Phalanx {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False

PUBLIC_NAMES = public_names()
_MODULES = "|".join(
    re.escape(name) for name, value in PUBLIC_NAMES.items() if ismodule(value)
)

# A reference to a public name must resolve. Other names are those of private modules and of other projects, whose pages are not here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", rf"(?!({_MODULES})\.\w+$).*")]

ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DESIGN.md": "design.md",
}
"""Files in the root of the repository, and the pages that include them."""


class CodeCell(CodeBlock):
    """A cell of a MyST notebook. It is shown as Python; what it prints is the block that follows it in the page."""

    required_arguments = 0

    def run(self):
        """Returns the cell as a code block."""
        self.arguments = ["python"]
        return super().run()


def public_paths():
    """Returns the shortest public name of each object, by the full name of its definition."""
    paths = {}
    for public in sorted(
        PUBLIC_NAMES, key=lambda name: (name.count("."), len(name), name)
    ):
        value = PUBLIC_NAMES[public]
        if getattr(value, "__module__", "").startswith("phalanx."):
            paths.setdefault(
                f"{value.__module__}.{getattr(value, '__qualname__', '')}", public
            )
    return paths


PUBLIC_PATHS = public_paths()


def link_public_name(app, env, node, contnode):
    """Links an annotation, which names the private module that defines a class, to the public name of the class."""
    public = PUBLIC_PATHS.get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or public is None:
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], public, node, contnode
    )


def link_root_pages(app, docname, source):
    """Points links to files in the root of the repository at the pages that include them."""
    for name, page in ROOT_PAGES.items():
        source[0] = source[0].replace(
            f"](../{name}", f"]({'../' * docname.count('/')}{page}"
        )


def write_commands(app, docname, source):
    """Puts the commands into the page about the command line, which is read again when they change."""
    if docname == "command_line":
        app.env.note_dependency(cli.__file__)
        source[0] = source[0].replace("<!-- commands -->", commands_in_markdown())


def break_names(app, pagename, templatename, context, doctree):
    """Allows long names to break after a dot, an underscore or a bracket, so that tables fit on a phone."""
    inline_code = re.compile(r'(?<=<span class="pre">)[^<]+')
    for part in ("body", "toc"):
        context[part] = inline_code.sub(
            lambda code: re.sub(r"[._(=,/]+(?=[^)])", r"\g<0><wbr>", code[0]),
            context.get(part, ""),
        )


def remove_links_back(app, pagename, templatename, context, doctree):
    """Removes the links from sources to the reference: viewcode guesses their names, which may belong to another module."""
    if pagename.startswith("_modules/"):
        context["body"] = re.sub(
            r'<a class="viewcode-back".*?</a>', "", context["body"]
        )


_COLON = "\ue000"


def hide_colons(app, what, name, *rest):
    """Keeps napoleon from taking the words before a colon for the type of a property: annotations say the types."""
    if what in ("attribute", "data", "property"):
        lines = rest[-1]
        lines[:] = [line.replace(":", _COLON) for line in lines]


def show_colons(app, what, name, *rest):
    """Undoes `hide_colons`, after napoleon."""
    lines = rest[-1]
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def separate_suffixes(app, what, name, *rest):
    """Puts a separator after the backtick of `Variable`s, which docstrings write as in Markdown."""
    lines = rest[-1]
    lines[:] = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app):
    """Registers the directive and the handlers above."""
    app.add_directive("code-cell", CodeCell)
    app.connect("missing-reference", link_public_name)
    app.connect("source-read", link_root_pages)
    app.connect("source-read", write_commands)
    app.connect("html-page-context", break_names)
    app.connect("html-page-context", remove_links_back)
    app.connect("autodoc-process-docstring", separate_suffixes)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
