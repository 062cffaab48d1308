// Passages of documents: a text is cut where a paragraph, a sentence or a word ends, and passages are found by the
// words that they share with a question. As search/chunks.py cuts, and retrieval.py joins what was found.

import { PAGE_END } from "./document_text.js";

const SIZE = 1200; // characters of a passage at most
const MAX_NBYTES = 1900; // in UTF-8: never more tokens than that
const OVERLAP = 200; // characters that a passage may share with the one before
const BETWEEN = 8; // characters of white space between neighbours, at most
const MERGED = 3000; // characters of a passage that neighbours were added to, at most

// Where to cut, the best place first: each pattern matches up to the cut.
const CUTS = [
  /\n[^\S\n]*\n/g,
  /[.!?…]["'”’»)\]]*\s|[。！？]/g,
  /\n/g,
  /\s/g,
];

const encoder = new TextEncoder();
const buffer = new Uint8Array(MAX_NBYTES);

/** Return how many characters from an offset on are a passage at most: as UTF-8 they have MAX_NBYTES. */
function lengthAt(text, begin) {
  return encoder.encodeInto(text.slice(begin, begin + SIZE), buffer).read;
}

function endsIn(text, pattern, low, high) {
  const part = text.slice(low, high);
  return [...part.matchAll(pattern)].map((found) => low + found.index + found[0].length);
}

/** Return the last cut of the best kind between two offsets; the second, if there is none. */
function lastCut(text, low, high) {
  for (const pattern of CUTS) {
    const ends = endsIn(text, pattern, low, high);
    if (ends.length) return ends.at(-1);
  }
  return high;
}

/** Return the first beginning of a sentence, else of a word, before the second offset. */
function firstCut(text, low, high) {
  for (const pattern of [CUTS[1], CUTS[3]]) {
    const end = endsIn(text, pattern, Math.max(0, low), high).find((each) => each < high);
    if (end !== undefined) return end;
  }
  return high;
}

/** Return where the passages of a text begin and end: [[begin, end]]; none begins or ends with white space. */
export function cut(text) {
  const passages = [];
  const visible = /\S/g;
  let begin = 0;
  for (;;) {
    visible.lastIndex = begin;
    const found = visible.exec(text);
    if (!found) return passages;
    begin = found.index;
    const length = lengthAt(text, begin);
    const limit = begin + length;
    const isLast = limit >= text.length;
    const end = isLast ? text.length : lastCut(text, begin + Math.floor(length / 2), limit);
    passages.push([begin, begin + text.slice(begin, end).trimEnd().length]);
    if (isLast) return passages;
    begin = firstCut(text, end - OVERLAP, end);
  }
}

/** Return the numbers of the lines, or pages, on which a passage begins and ends. */
export function placeOf({ text, pages }, begin, end) {
  const mark = pages ? PAGE_END : "\n";
  const count = (from, to) => {
    let number = 0;
    for (let at = text.indexOf(mark, from); at >= 0 && at < to; at = text.indexOf(mark, at + 1)) number += 1;
    return number;
  };
  const first = 1 + count(0, begin);
  return { first, last: first + count(begin, end) };
}

// Words

const WORDS = /[\p{L}\p{M}\p{N}_]+/gu;
// Scripts that put no spaces between words: two letters that follow each other stand for a word.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}ー]+/gu;

/** Return the words of a text, without case and accents. */
export function wordsOf(text) {
  const plain = text.normalize("NFKD").replace(/\p{Mn}/gu, "").toLowerCase();
  const words = [];
  for (const [word] of plain.matchAll(WORDS)) {
    let end = 0;
    for (const { 0: run, index } of word.matchAll(UNSPACED)) {
      if (index > end) words.push(word.slice(end, index));
      const letters = [...run];
      if (letters.length === 1) words.push(run);
      for (let at = 0; at + 1 < letters.length; at += 1) words.push(letters[at] + letters[at + 1]);
      end = index + run.length;
    }
    if (end < word.length) words.push(word.slice(end));
  }
  return words;
}

const K1 = 1.2; // how soon repetitions of a word stop to count
const B = 0.75; // how much long passages are held back
const SLICE_MILLISECONDS = 12; // of work, after which the page may do something else

/** An index of the words of passages, ranked by BM25. Passages have numbers, in the order in which they are added. */
export class WordIndex {
  constructor() {
    this.postings = new Map(); // by word: [number, times, …]
    this.lengths = [];
    this.total = 0; // of the lengths
  }

  /** Add passages; the page goes on meanwhile. */
  async add(texts) {
    let start = performance.now();
    for (const text of texts) {
      const words = wordsOf(text);
      const times = new Map();
      for (const word of words) times.set(word, (times.get(word) ?? 0) + 1);
      for (const [word, count] of times) {
        if (!this.postings.has(word)) this.postings.set(word, []);
        this.postings.get(word).push(this.lengths.length, count);
      }
      this.lengths.push(words.length);
      this.total += words.length;
      if (performance.now() - start > SLICE_MILLISECONDS) {
        await new Promise((resolve) => setTimeout(resolve));
        start = performance.now();
      }
    }
  }

  /** Return the numbers of the passages that share words with a question, the best first: at most `count`. */
  find(question, count) {
    const scores = new Map();
    const average = this.total / this.lengths.length;
    for (const word of new Set(wordsOf(question))) {
      const found = this.postings.get(word) ?? [];
      const holders = found.length / 2;
      const weight = Math.log(1 + (this.lengths.length - holders + 0.5) / (holders + 0.5));
      for (let at = 0; at < found.length; at += 2) {
        const [number, times] = [found[at], found[at + 1]];
        const share = (times * (K1 + 1)) / (times + K1 * (1 - B + (B * this.lengths[number]) / average));
        scores.set(number, (scores.get(number) ?? 0) + weight * share);
      }
    }
    return [...scores].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, count).map(([number]) => number);
  }
}

/**
 * Return the best of some passages {document, begin, end}, given in their order, widened to the neighbours among the
 * others: at most `count`. A text that several documents hold is found once.
 */
export function chosen(passages, count) {
  const best = [];
  const seen = new Set();
  for (const { document, begin, end } of passages) {
    const text = document.text.slice(begin, end);
    if (seen.has(text)) continue;
    const near = best.find((other) => other.document === document && begin <= other.end + BETWEEN
      && other.begin <= end + BETWEEN && Math.max(end, other.end) - Math.min(begin, other.begin) <= MERGED);
    if (near) Object.assign(near, { begin: Math.min(begin, near.begin), end: Math.max(end, near.end) });
    else if (best.length < count) best.push({ document, begin, end });
    else continue;
    seen.add(text);
  }
  return best;
}
