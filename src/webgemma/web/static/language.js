// The page's words in the reader's language; the English text is the key of each translation.

const languages = ["de", "es", "fr", "ja", "ar"]; // besides English; each has languages/CODE.json
const chosen = navigator.languages.map((tag) => tag.split("-")[0]).find((code) => code === "en" || languages.includes(code)) ?? "en";
const words = chosen === "en" ? {} : await load(chosen);

async function load(code) {
  try {
    return await (await fetch(new URL(`languages/${code}.json`, import.meta.url))).json();
  } catch {
    return {}; // English is better than no page
  }
}

export const language = Object.keys(words).length ? chosen : "en";

/** Return a text in the reader's language, with `{name}` replaced by values.name. */
export const t = (text, values = {}) =>
  (words[text] ?? text).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
