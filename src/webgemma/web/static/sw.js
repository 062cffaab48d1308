// The service worker: starts the page without its server, and never keeps an old page before a new one.
//
// One cache holds one version of everything, as /api/offline lists it. Each visit first asks the server
// for its version: the same, or no server, and all comes from the cache; another, and all comes from
// the server until the page (once its model is loaded) has the new version copied as a whole.

const PREFIX = "webgemma-page-";
const PATIENCE_MILLISECONDS = 2000; // with a server that is there and says nothing
const UNKEPT = /^\/(models\/|api\/(models|offline)$)/;

let choice = null; // the promise of a cache, or of null: from the server
let refreshing = null;

const offer = (signal) => fetch("/api/offline", { cache: "no-store", signal });

/** The names of the caches that are whole, the newest last. */
async function wholeNames() {
  const names = (await caches.keys()).filter((name) => name.startsWith(PREFIX));
  const known = await Promise.all(names.map((name) => caches.match("/", { cacheName: name })));
  return names.filter((_, at) => known[at]);
}

/** The cache to serve from, or null. */
async function choose() {
  const name = (await wholeNames()).at(-1);
  if (!name) return null;
  let answer;
  try {
    answer = await offer(AbortSignal.timeout(PATIENCE_MILLISECONDS));
  } catch {
    return caches.open(name); // no server
  }
  // Another program may live at this address by now: then all is its own.
  const { version } = answer.ok ? await answer.json().catch(() => ({})) : {};
  return name === PREFIX + version ? caches.open(name) : null;
}

/** Copy what the server has now, all of it or nothing, and let older copies go. */
async function refresh() {
  const { version, files } = await (await offer()).json();
  const name = PREFIX + version;
  if (!(await wholeNames()).includes(name)) {
    const cache = await caches.open(name);
    await cache.addAll(files.map((url) => new Request(url, { cache: "no-cache" })));
  }
  for (const other of await caches.keys()) {
    if (other.startsWith(PREFIX) && other !== name) await caches.delete(other);
  }
  choice = null;
}

function refreshOnce() {
  refreshing ??= refresh().finally(() => { refreshing = null; });
  return refreshing;
}

async function answer(request, path, cache) {
  return (await (await cache)?.match(path)) ?? fetch(request);
}

addEventListener("install", (event) => {
  skipWaiting();
  event.waitUntil(refreshOnce());
});
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("message", (event) => {
  if (event.data === "refresh") event.waitUntil(refreshOnce().catch(() => {})); // offline, or no room
});
addEventListener("fetch", (event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  if (request.method !== "GET" || origin !== location.origin || request.headers.has("Range")) return;
  if (UNKEPT.test(pathname)) return;
  if (request.mode === "navigate" || choice === null) choice = choose();
  event.respondWith(answer(request, pathname, choice));
});
