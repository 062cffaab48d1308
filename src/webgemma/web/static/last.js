// The model that was used last: the next visit begins with it, unless it never got there.

const KEY = "webgemma-model";

function write(kept) {
  try {
    localStorage.setItem(KEY, JSON.stringify(kept));
  } catch { /* the next visit begins with the bundled model */ }
}

/** What a visit begins with: {model, isSuspect}; suspect is one that was loading when the page ended. */
export function lastModel() {
  try {
    const { model, isLoaded } = JSON.parse(localStorage.getItem(KEY)) ?? {};
    const isKnown = typeof model?.name === "string" && ["url", "stored"].includes(model.source?.kind);
    return isKnown ? { model, isSuspect: !isLoaded } : null;
  } catch {
    return null;
  }
}

/** A model is about to be loaded, or is there; a file must be chosen anew at each visit. */
export function rememberModel({ name, source: { eyes, ...source } }, isLoaded) {
  if (source.kind === "file") write(null);
  else write({ model: { name, source: eyes?.kind === "url" ? { ...source, eyes } : source }, isLoaded });
}
