// The page's texts in the reader's language. The English text is the key of each translation: languages/CODE.json has
// them, and the number of a plural chooses among forms as Intl.PluralRules names them ({"one": …, "other": …}).

const LANGUAGES = ["de", "es", "fr", "ja", "ar"]; // besides English
const RIGHT_TO_LEFT = ["ar"];
const KEY = "webgemma.language"; // in localStorage: a language chosen on the page; none: the browser's
const ATTRIBUTES = ["alt", "aria-label", "placeholder", "title"];

/** The languages of the page by their codes, each in its own name. */
export const LANGUAGE_NAMES = {
  en: "English", de: "Deutsch", es: "Español", fr: "Français", ja: "日本語", ar: "العربية",
};

/** Return the language that the user has chosen on the page, or "" for the browser's. */
export function chosenLanguage() {
  try {
    const stored = localStorage.getItem(KEY);
    return stored in LANGUAGE_NAMES ? stored : "";
  } catch {
    return ""; // storage is forbidden
  }
}

/** Store a choice of language, which applies when the page is loaded again. */
export function chooseLanguage(code) {
  try {
    if (code) localStorage.setItem(KEY, code);
    else localStorage.removeItem(KEY);
  } catch { /* storage is forbidden: the browser's language stays */ }
}

const browserLanguage = () => navigator.languages.map((tag) => tag.split("-")[0]).find((code) => code in LANGUAGE_NAMES);

async function load(code) {
  try {
    return await (await fetch(new URL(`languages/${code}.json`, import.meta.url))).json();
  } catch {
    return null; // English is better than no page
  }
}

const wanted = chosenLanguage() || browserLanguage() || "en";
const loaded = LANGUAGES.includes(wanted) ? await load(wanted) : null;
const texts = loaded ?? {};

/** The code of the language that the page is in. */
export const language = loaded ? wanted : "en";

const plurals = new Intl.PluralRules(language);
/** Return a text such as "1.5 GB" between two invisible marks, which keep its order in text from right to left. */
export const isolated = RIGHT_TO_LEFT.includes(language) ? (value) => (value === undefined ? value : `\u2068${value}\u2069`) : (value) => value;
const filled = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => isolated(values[name]) ?? whole);

/** Return a text in the reader's language, with `{name}` replaced by values.name. */
export const t = (text, values = {}) => filled(texts[text] ?? text, values);

/**
 * Return the form of a text for a number, with `{count}` replaced by it: plural(2, "{count} token", "{count} tokens").
 * The key of its translations is the second form.
 */
export function plural(count, one, other, values = {}) {
  const forms = texts[other];
  const form = plurals.select(count);
  const text = forms ? forms[form] ?? forms.other : form === "one" ? one : other;
  return filled(text, { count: count.toLocaleString(language), ...values });
}

/** Return a number with this many decimals, as the reader's language writes it: 1.5 or 1,5. */
export const decimal = (value, digits) => value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Translate the texts and labels of the HTML below a node, except what is marked with translate="no". */
export function translate(root) {
  if (language === "en") return;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, (node) =>
    (node.translate === false ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
  for (let node = walker.currentNode; node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) {
      const text = node.data.trim();
      if (text) node.data = node.data.replace(text, () => t(text));
    } else {
      for (const name of ATTRIBUTES) {
        if (node.hasAttribute(name)) node.setAttribute(name, t(node.getAttribute(name)));
      }
    }
  }
}

document.documentElement.lang = language;
document.documentElement.dir = RIGHT_TO_LEFT.includes(language) ? "rtl" : "ltr";
translate(document.body);
