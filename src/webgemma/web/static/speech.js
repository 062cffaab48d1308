// Reading a reply aloud, with a voice of this device for the language of the reply.

import { button } from "./dom.js";
import { language, t } from "./language.js";

const MAX_LETTERS = 220; // of one utterance: browsers cut long ones off
const LEFT_OUT = "figure.code, pre, button, svg, audio, script, style, annotation, .footnote-ref, .visually-hidden";
const BLOCKS = "p, li, h1, h2, h3, h4, h5, h6, tr, td, th, blockquote, figcaption, dt, dd, br, hr";

// Languages by their letters, the more particular ones first,
const SCRIPTS = [
  ["ja", /[\p{Script=Hiragana}\p{Script=Katakana}]/gu], ["ko", /\p{Script=Hangul}/gu], ["zh", /\p{Script=Han}/gu],
  ["ar", /\p{Script=Arabic}/gu], ["he", /\p{Script=Hebrew}/gu], ["ru", /\p{Script=Cyrillic}/gu], ["el", /\p{Script=Greek}/gu],
  ["hi", /\p{Script=Devanagari}/gu], ["th", /\p{Script=Thai}/gu],
];
// and those with Latin letters by their most frequent words.
const WORDS = {
  en: "the and is of to in that it you for are with this be on as not have or by",
  de: "der die das und ist nicht ein eine zu den von mit sich auf für es dem im auch als",
  es: "el la los las de que y en un una es por con para se no del al lo como",
  fr: "le la les de des et est une un que dans pour pas qui sur il avec ce vous du",
  it: "il lo la gli di che e è un una per con non del della sono si dei nel come",
  pt: "o a os as de que e em um uma é para com não do da se no na por",
  nl: "de het een en van is dat niet in op te zijn voor met die aan ook er om je",
};
const WORD_SETS = Object.entries(WORDS).map(([code, words]) => [code, new Set(words.split(" "))]);

const speech = globalThis.speechSynthesis; // missing in some browsers

/** Return the language of a text; without a sign, that of the page. */
export function languageOf(text) {
  const letters = text.match(/\p{L}/gu)?.length ?? 0;
  for (const [code, pattern] of SCRIPTS) {
    const share = (text.match(pattern)?.length ?? 0) / Math.max(1, letters);
    if (share > (code === "ja" ? 0.1 : 0.4)) return code; // Japanese mixes kana with Han letters
  }
  const words = text.toLowerCase().match(/\p{L}+/gu) ?? [];
  const counts = WORD_SETS.map(([code, known]) => [code, words.filter((word) => known.has(word)).length]);
  const [[best, count]] = counts.sort(([a, m], [b, n]) => n - m || (b === language) - (a === language));
  return count ? best : language;
}

/** Return what is read of a reply's element: its text without code, each block as a sentence of its own. */
function spokenText(node) {
  const copy = node.cloneNode(true);
  for (const part of copy.querySelectorAll(LEFT_OUT)) part.remove();
  for (const block of copy.querySelectorAll(BLOCKS)) block.append("\n");
  return copy.textContent.replace(/[ \t]+/g, " ").replace(/\s*\n\s*/g, "\n").trim();
}

/** Return the parts of a text that are spoken one after the other: sentences, in a few words each. */
function utterances(text, code) {
  const parts = [];
  for (const line of text.split("\n")) {
    for (const { segment } of new Intl.Segmenter(code, { granularity: "sentence" }).segment(line)) {
      let rest = segment.trim();
      while (rest.length > MAX_LETTERS) {
        const cut = rest.lastIndexOf(" ", MAX_LETTERS);
        parts.push(rest.slice(0, cut > 0 ? cut : MAX_LETTERS));
        rest = rest.slice(cut > 0 ? cut : MAX_LETTERS).trim();
      }
      if (rest) parts.push(rest);
    }
  }
  return parts;
}

/** Return this device's voice for a language, its own choice first; undefined if there is none. */
function voiceFor(code) {
  const voices = speech.getVoices().filter(({ lang }) => lang.toLowerCase().split(/[-_]/)[0] === code);
  const wanted = navigator.languages.find((tag) => tag.split("-")[0] === code);
  return voices.find(({ lang }) => lang.replace("_", "-") === wanted) ?? voices.find((voice) => voice.default) ?? voices[0];
}

let current = null; // the button whose reply is read

function show(pressed, isReading) {
  pressed.textContent = isReading ? t("Stop reading") : t("Read aloud");
}

/** Stop reading. */
export function stopReading() {
  if (!current) return;
  show(current, false);
  current = null;
  speech.cancel();
}

function read(pressed, node) {
  const text = spokenText(node);
  const code = languageOf(text);
  const parts = utterances(text, code);
  if (!parts.length) return;
  current = pressed;
  show(pressed, true);
  parts.forEach((part, i) => {
    const utterance = new SpeechSynthesisUtterance(part);
    Object.assign(utterance, { lang: code, voice: voiceFor(code) ?? null });
    const end = () => current === pressed && stopReading();
    if (i === parts.length - 1) utterance.onend = end;
    utterance.onerror = end;
    speech.speak(utterance);
  });
}

/** Return the button that reads an element aloud, or stops; it is shown where there are voices. */
export function readButton(node) {
  const pressed = button(t("Read aloud"), "quiet read", () => {
    const isReading = current === pressed;
    stopReading();
    if (!isReading) read(pressed, node);
  });
  return pressed;
}

function noteVoices() {
  document.documentElement.classList.toggle("has-voices", Boolean(speech?.getVoices().length));
}

speech?.addEventListener?.("voiceschanged", noteVoices); // browsers find them late
noteVoices();
addEventListener("pagehide", stopReading); // else some browsers go on after a reload
