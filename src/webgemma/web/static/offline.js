// Has the page kept in the browser, so that the next visit needs no server.

/** Call it once the page has all it needs: the copying shall not slow the first visit down. */
export async function keepPage() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register("/sw.js");
    const { active } = await navigator.serviceWorker.ready;
    active.postMessage("refresh");
  } catch { /* forbidden, or no room: the page works as long as its server does */ }
}
