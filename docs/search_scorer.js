// How the search ranks pages. tests/docs/searching.py ranks in the same way.
"use strict";

var Scorer = {
  // Guides come before the names of modules and classes, unless the query is such a name.
  objNameMatch: 9,
  objPartialMatch: 4,
  objPrio: { 0: 5, 1: 5, 2: 5 },
  objPrioDefault: 5,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  // Titles of pages count more than titles of sections, and guides more than lists of names.
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (kind !== "text" && kind !== "title") return score;
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().split(/[^\p{L}\p{N}_]+/u).filter(Boolean);
    const matches = words.filter((word) => title.toLowerCase().includes(word));
    return score + (20 * matches.length) / words.length - (docname.startsWith("api/") ? 3 : 0);
  },
};
