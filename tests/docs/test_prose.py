"""The English of pages, docstrings, comments and messages: phrases that were rewritten do not come back."""

import ast
import functools
import inspect
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "DESIGN.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
_LIBRARY = "(JAX|Keras|NumPy|Phalanx|Ray|TensorFlow)"
_OBJECT = "(array|device|error|function|object|option|program)"
PHRASES = {
    r"how-manieth": "a number, named",
    r"\banew\b": "again, or new",
    r"\bthat which\b": "what",
    r"\ball get\b": "every X gets",
    r"\bfor ever\b": "forever",
    r"(?<=[.!?] )Those of\b": "the noun",
    r"\b(one|two|three|\d+) [a-z]+ an? (batch|device|dtype|epoch|execution|group|leaf|process|replica|row|second|server|shard|step|thread|variable|worker)\b": "per",
    r"\b(bytes|rows|steps|tokens) an? (second|step|device|replica)\b": "per",
    r"\bbeside\b(?!:)": "next to, compared with, or in addition to",
    r"\b(go|goes|going|went) on\b(?! to\b)": "continues, or resumes",
    r", also (after|before|for|if|in|inside|on|those|when|where|while|with|within)\b": "even if, or including",
    r"\b(stands?|stood|standing) still\b": "is stuck, or hangs",
    r"\b[Aa]n? (\w+ )?\w+ of (its|their|your) own\b": "its own X, or a separate X",
    r"\w+s of (their|your) own\b": "their own X",
    rf"\b([Aa]ny?|[Aa]|no) {_OBJECT} of {_LIBRARY}\b(?!')": "a JAX error",
    rf"\b{_OBJECT}s of {_LIBRARY}\b(?!'| 1)": "JAX errors",
    r"\b(makes?|made|making) (no|one|the next|\d[\d.,]*) (of the )?steps?\b": "takes, or runs",
    r"\b(are|is) not here\b": "that you don't have",
    r"\bwithout a word\b": "without an error message, or a warning",
    r"\b[Aa] training\b(?! (batch|cluster|function|job|loop|program|run|script|set|state|step))": "a training run",
    r"\b[Tt]rainings\b": "training runs",
    r"\b(leaves?|leaving|left) (it |them |these |this )?out\b": "skips, or omits",
    r"\bwhole gradients?\b": "full, or uncompressed",
    r"\broll call\b": "handshake",
    r"\bthe watch\b": "the watchdog",
    r"\bdone by half\b": "half done",
}
PAGE_PHRASES = PHRASES | {
    r"\bmeanwhile\b": "while, or in the meantime",
    r"\bof which\b": "whose, or a sentence of its own",
    r"\b(hears?|heard) (of|that)\b": "learns, or receives",
    r"\brooms\b": "packages",
    r"(?<![Tt]here )\b(is|are) no (?!longer|more|less|such|need|other)[a-z]+\b(?! left)": "is not a",
}
SOURCE_PHRASES = PHRASES | {
    r"^Returns what\b": "the noun that is returned",
    r"^(Lets|Says|Where|Which)\b": "a verb such as Returns, Records or Rejects",
    r"\bsomebody\b": "the user, the caller, or the passive",
    r"\bbe asked for\b": "be requested, or what the function returns",
    r"\b(is|are) left to be\b": "is deferred, or remains",
    r"\btaken apart\b": "split, or flattened",
    r"\bnothing tells\b": "is unknown",
    r"\bwhere (it|they) lives?\b": "where it is stored",
    r"\bthat (is|are) no (?!longer|more|less|such)[a-z]+": "that is not a",
    r": it (is|was|is something else)[.;]": "the condition, with its noun",
    r": another number of\b": "a different number of",
}


def prose_of(page):
    """Returns the lines of a page, with code left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block.group().count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"`[^`]*`", "", line) for line in text.splitlines()]


def phrases_in(lines, phrases, where):
    """Returns a message for each line that has one of the phrases."""
    return [
        f"{where}:{number}: {match.group()!r}: write {instead}"
        for number, line in lines
        for phrase, instead in phrases.items()
        for match in [re.search(phrase, line)]
        if match
    ]


def test_pages_have_none_of_the_phrases():
    """Each phrase is one that no native reader uses; its value in the table says what to write instead."""
    messages = [m for page in PAGES for m in phrases_in(enumerate(prose_of(page), 1), PAGE_PHRASES, page)]
    assert not messages, "\n".join(messages)


@functools.cache
def modules():
    """Returns the path, the text and all nodes of each module."""
    texts = [(path, path.read_text("utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))]
    return [(path, text, [*ast.walk(ast.parse(text))]) for path, text in texts]


def prose_in(source, nodes):
    """Returns the docstrings (of variables too) and comment lines of a module, each with its line number, with code left out."""
    texts = [
        (node.lineno, inspect.cleandoc(node.value.value))
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in texts:
        without_examples = re.sub(r"^\s*(>>>|\.\.\.).*$", "", text, flags=re.MULTILINE)
        yield line, " ".join(re.sub(r"`[^`]*`", "", without_examples).split())


def test_sources_have_none_of_the_phrases():
    """Docstrings and comments do not have them either."""
    messages = [m for path, *module in modules() for m in phrases_in(prose_in(*module), SOURCE_PHRASES, path)]
    assert not messages, "\n".join(messages)


def messages_in(nodes):
    """Returns the texts of a module that are neither docstrings nor single words, such as messages, each with its line number."""
    statements = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in statements
            and " " in node.value
        ):
            yield node.lineno, node.value


def test_messages_have_none_of_the_phrases():
    """Errors, warnings, reports and helps of commands do not have them either."""
    messages = [m for path, _, nodes in modules() for m in phrases_in(messages_in(nodes), PHRASES, path)]
    assert not messages, "\n".join(messages)


def test_sentences_do_not_continue_a_code_block():
    """A code block is not the subject of the sentence below it, because the block may scroll or be copied alone."""
    continued = []
    for page in PAGES:
        parts = (ROOT / page).read_text(encoding="utf-8").split("\n```")
        continued += [f"{page}: {text.strip()[:60]}" for text in parts[2::2] if re.match(r"\n\n?[a-z]", text)]
    assert continued == []
