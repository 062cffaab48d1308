// The service worker: serves the page without its server, and never serves an outdated page while the server runs.
//
// One cache holds one version of all files that api/offline lists. Each visit first requests the server's version.
// If it is the cached one, or the server does not respond, all files come from the cache. Otherwise they come from
// the server until the page, after its model is loaded, requests a refresh, which caches that version as a whole.
//
// Addresses are relative to the folder of this file, which is the page's. Caches belong to a whole origin: their names
// carry the folder, as pages in other folders have caches, too.

const FOLDER = new URL("./", location.href).pathname;
const PREFIX = FOLDER === "/" ? "webgemma-page-" : `webgemma-page${FOLDER}`;
const TIMEOUT_MILLISECONDS = 2000; // for a server that accepts connections and does not respond
const UNCACHED = /^(models\/|api\/(models|offline)$)/;

let cacheChoice = null; // a promise of the cache to serve from, or of null: the server
let refreshing = null;

const fetchListing = (signal) => fetch("api/offline", { cache: "no-store", signal });

/** Return the names of this page's caches. */
const ownNames = async () => (await caches.keys()).filter(
  (name) => name.startsWith(PREFIX) && !name.slice(PREFIX.length).includes("/"), // those are of a folder in this one
);

/** Return the names of the complete caches, the latest last. */
async function completeNames() {
  const names = await ownNames();
  const pages = await Promise.all(names.map((name) => caches.match(FOLDER, { cacheName: name })));
  return names.filter((_, at) => pages[at]);
}

/** Return the cache to serve from, or null. */
async function chooseCache() {
  const name = (await completeNames()).at(-1);
  if (!name) return null;
  let response;
  try {
    response = await fetchListing(AbortSignal.timeout(TIMEOUT_MILLISECONDS));
  } catch {
    return caches.open(name); // no server
  }
  // Another program may use this address: then everything comes from that.
  const { version } = response.ok ? await response.json().catch(() => ({})) : {};
  return name === PREFIX + version ? caches.open(name) : null;
}

/** Cache the server's version, all of it or nothing, and delete other versions. */
async function refresh() {
  const { version, files } = await (await fetchListing()).json();
  const name = PREFIX + version;
  if (!(await completeNames()).includes(name)) {
    const cache = await caches.open(name);
    await cache.addAll(files.map((url) => new Request(url, { cache: "no-cache" })));
  }
  for (const other of await ownNames()) {
    if (other !== name) await caches.delete(other);
  }
  cacheChoice = null;
}

function refreshOnce() {
  refreshing ??= refresh().finally(() => { refreshing = null; });
  return refreshing;
}

/** Respond to an address with the token, which only the server can answer; without it, as to any other. */
async function respondToToken(request, path) {
  try {
    return await fetch(request);
  } catch {
    return respond(request, path, cacheChoice = chooseCache());
  }
}

async function respond(request, path, choice) {
  let cached;
  try {
    cached = await (await choice)?.match(path);
  } catch { /* the cache cannot be read: the server may respond */ }
  return cached ?? fetch(request);
}

addEventListener("install", (event) => {
  skipWaiting();
  event.waitUntil(refreshOnce());
});
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("message", (event) => {
  if (event.data === "refresh") event.waitUntil(refreshOnce().catch(() => {})); // offline, or the storage is full
});
addEventListener("fetch", (event) => {
  const { request } = event;
  const { origin, pathname, searchParams } = new URL(request.url);
  if (request.method !== "GET" || origin !== location.origin || request.headers.has("Range")) return;
  if (!pathname.startsWith(FOLDER) || UNCACHED.test(pathname.slice(FOLDER.length))) return;
  const path = pathname === `${FOLDER}index.html` ? FOLDER : pathname; // hosts serve the page as both
  if (request.mode === "navigate" && searchParams.has("token")) {
    event.respondWith(respondToToken(request, path));
    return;
  }
  if (request.mode === "navigate" || cacheChoice === null) cacheChoice = chooseCache();
  event.respondWith(respond(request, path, cacheChoice));
});
