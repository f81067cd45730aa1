"""Ranks the pages of a built site as its search does: `searchtools.js` of Sphinx with `docs/search_scorer.js`."""

import json
import re
from pathlib import Path

from sphinx.search.en import SearchEnglish

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
OBJECT_NAME, OBJECT_PART, OBJECT_PRIORITY = 9, 4, 5
WORDS_IN_TITLE, LIST_OF_NAMES = 20, 3


class Index:
    """The index of a site.

    Args:
      site: the folder with `searchindex.js`.
    """

    def __init__(self, site):
        text = (Path(site) / "searchindex.js").read_text(encoding="utf-8")
        self._index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
        self._language = SearchEnglish({})
        self._stem = self._language.stem

    def pages_for(self, query):
        """Returns the names of the pages that a query finds, best first."""
        words = re.findall(r"\w+", query.lower())
        scores = {}
        for page, title, score in [*self._titles(query.lower()), *self._texts(words)]:
            in_title = sum(word in title.lower() for word in words) / len(words)
            score += WORDS_IN_TITLE * in_title - LIST_OF_NAMES * page.startswith("api/")
            scores.setdefault(page, []).append((-score, title.lower()))
        for page, title, score in self._objects(words):
            scores.setdefault(page, []).append((-score, title.lower()))
        return sorted(scores, key=lambda page: min(scores[page]))

    def _titles(self, query):
        """Yields the titles of pages and sections that contain the query."""
        pages, titles = self._index["docnames"], self._index["titles"]
        for title, places in self._index["alltitles"].items():
            if query in title.lower() and len(query) >= len(title) / 2:
                for file, _ in places:
                    is_page = titles[file] == title
                    shown = title if is_page else f"{titles[file]} > {title}"
                    yield pages[file], shown, round(TITLE * len(query) / len(title)) + is_page

    def _texts(self, words):
        """Yields the pages with all words that occur anywhere. A page has the score of its best word."""
        scores = {}
        stems = {self._stem(word) for word in words if word not in self._language.stopwords and not word.isdigit()}
        for stem in stems:
            for file, score in self._files_with(stem).items():
                scores.setdefault(file, {})[stem] = score
        numbers = (len(stems), sum(len(stem) > 2 for stem in stems))
        for file, found in scores.items():
            if len(found) in numbers:
                yield self._index["docnames"][file], self._index["titles"][file], max(found.values())

    def _files_with(self, stem):
        """Returns a score for each page that has a word, or a longer one, in its text or titles. Later matches count."""
        scores = {}
        for is_whole, index, score in (
            (True, "terms", TERM),
            (True, "titleterms", TITLE),
            (False, "terms", PARTIAL_TERM),
            (False, "titleterms", PARTIAL_TITLE),
        ):
            terms = self._index[index]
            if (stem in terms) is is_whole:
                for term in [stem] if is_whole else [term for term in terms if stem in term and len(stem) > 2]:
                    files = terms[term]
                    scores |= dict.fromkeys([files] if isinstance(files, int) else files, score)
        return scores

    def _objects(self, words):
        """Yields the names of modules, classes and functions that contain a word, and the others in their description."""
        pages, titles, kinds = self._index["docnames"], self._index["titles"], self._index["objnames"]
        for prefix, objects in self._index["objects"].items():
            for file, kind, _, _, name in objects:
                full_name = f"{prefix}.{name}".lstrip(".")
                last = full_name.lower().rpartition(".")[2]
                description = f"{prefix} {name} {kinds[str(kind)][2]} {titles[file]}".lower()
                for word in {*words}:
                    if word in full_name.lower() and all(other in description for other in words if other != word):
                        match = OBJECT_NAME if word in (last, full_name.lower()) else OBJECT_PART * (word in last)
                        yield pages[file], full_name, match + OBJECT_PRIORITY
