// Requests to the server, with the API key where it needs one: the person is asked for it. It is kept in this tab
// or, if the person wants that, in this browser, and is sent in a header only.

import { byId } from "./dom.js";
import { t } from "./language.js";

const STORED = "webgemma.key";
const NO_ANSWER = t("The server does not respond: check that it is running and that this device reaches it, then try again.");
const WRONG_KEY = t("That is not one of the server’s API keys.");
const NO_KEY = t("An API key has letters, digits and signs, without spaces.");

/** The storages that a key may be in: of this tab, and of this browser; a browser may forbid both. */
function storages() {
  try {
    return [sessionStorage, localStorage];
  } catch {
    return [];
  }
}

const storedKey = () => storages().map((storage) => storage.getItem(STORED)).find(Boolean) ?? null;

let key = storedKey();
let asking = null; // a promise while the dialog is open

function setKey(value) {
  key = value;
  byId("forget-key").hidden = key === null;
}

function keepKey(value, isRemembered) {
  forgetKey();
  setKey(value);
  try {
    storages()[isRemembered ? 1 : 0]?.setItem(STORED, value);
  } catch { /* the storage is full: the key lasts until the page is closed */ }
}

function forgetKey() {
  setKey(null);
  for (const storage of storages()) storage.removeItem(STORED);
}

/** Drop a key that the server refuses, unless it is another one by now; one that another tab has stored takes its place. */
function dropKey(refused) {
  for (const storage of storages()) if (storage.getItem(STORED) === refused) storage.removeItem(STORED);
  if (key === refused) setKey(storedKey());
}

/** Ask the person for the key, and return whether there is one now. */
function askKey(problem) {
  const dialog = byId("key-dialog");
  byId("key-problem").textContent = problem;
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(key !== null), { once: true }));
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key").value.trim();
  const isKey = /^[\x21-\x7e]+$/.test(value); // what a header can hold
  byId("key-problem").textContent = isKey ? "" : NO_KEY;
  if (!isKey) return;
  keepKey(value, byId("key-remember").checked);
  byId("key").value = "";
  byId("key-dialog").close();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("forget-key").addEventListener("click", forgetKey);
setKey(key);

/**
 * Return the server's response; throw an Error with a message for the user if there is none. Unless `mayAsk`, the person
 * is not asked for a key: nothing was requested of the page.
 */
export async function request(path, options = {}, mayAsk = true) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => {
      throw options.signal?.aborted ? error : new Error(NO_ANSWER);
    });
    if (response.status !== 401) return response;
    dropKey(used);
    if (key !== null) continue; // another request or tab has asked
    if (!mayAsk) return response;
    asking ??= askKey(used === null ? "" : WRONG_KEY).finally(() => { asking = null; });
    if (!await asking) return response;
  }
}

/** Return what is wrong, as the server says it. */
export async function problemOf(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return t("The server responded with status {status}: try again later.", { status: response.status }); // perhaps a proxy before it
  }
}
