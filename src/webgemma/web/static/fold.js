// Texts as search compares them: without case, accents and other differences that people do not type. "Café", "CAFE"
// and "café" in another encoding are equal; so are Arabic words with and without vowel signs, wide and narrow letters
// of Japanese. Voiced kana stay different from unvoiced ones.

const MARKS = "[\\p{M}\\uff9e\\uff9f]"; // with the narrow voicing marks of Japanese
const NOT_ASCII = /[^\x00-\x7f]/;
// Letters that stay as they are when no mark follows: kana, Han, Hangul, most of Arabic and small Cyrillic.
const PLAIN = "\\u3041-\\u3096\\u30a1-\\u30fa\\u4e00-\\u9fff\\uac00-\\ud7a3\\u0621\\u0627-\\u063a\\u0641-\\u064a\\u0430-\\u0438\\u043a-\\u044f";
const CLUSTERS = new RegExp(`[^\\x00-\\x7f${PLAIN}]${MARKS}*|[\\x00-\\x7f${PLAIN}]${MARKS}+`, "gu"); // those that may change
const ALL_CLUSTERS = new RegExp(`[^]${MARKS}*`, "gu");
// Accents of European letters, points of Hebrew, vowel signs and lengthenings of Arabic.
const IGNORED = /[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670]/g;
const LETTERS = { "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ı": "i", "ς": "σ" }; // which nothing decomposes
const LETTER = new RegExp(`[${Object.keys(LETTERS).join("")}]`, "g");
const MOST_CLUSTERS = 20_000; // that are remembered

const known = new Map(); // clusters that are folded

function foldCluster(cluster) {
  let folded = known.get(cluster);
  if (folded === undefined) {
    folded = cluster.normalize("NFKD").toLowerCase().replace(IGNORED, "").normalize("NFC").replace(LETTER, (letter) => LETTERS[letter]);
    if (known.size >= MOST_CLUSTERS) known.clear();
    known.set(cluster, folded);
  }
  return folded;
}

export const isAscii = (text) => !NOT_ASCII.test(text);

/** Return a text as search compares it. */
export const fold = (text) => (isAscii(text) ? text : text.replace(CLUSTERS, foldCluster)).toLowerCase();

/** Return the words of what was typed into the search, folded, each once. */
export const wordsOf = (query) => [...new Set(fold(query).split(/\s+/).filter(Boolean))];

/** Whether every word occurs in one of these folded texts. */
export const haveAll = (texts, words) => words.every((word) => texts.some((text) => text.includes(word)));

/** Return where words occur in a text, as [start, end] in their order, without overlaps. */
export function rangesOf(text, words) {
  const places = []; // in the text, of each character of the folded text
  let folded = "";
  for (const { 0: cluster, index } of text.matchAll(ALL_CLUSTERS)) {
    const part = fold(cluster);
    for (let i = 0; i < part.length; i += 1) places.push([index, index + cluster.length]);
    folded += part;
  }
  const found = words.flatMap((word) => {
    const ranges = [];
    for (let at = folded.indexOf(word); at >= 0; at = folded.indexOf(word, at + word.length)) {
      ranges.push([places[at][0], places[at + word.length - 1][1]]);
    }
    return ranges;
  });
  const ranges = [];
  for (const [start, end] of found.sort((a, b) => a[0] - b[0])) {
    const last = ranges.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else ranges.push([start, end]);
  }
  return ranges;
}
