// Names of what the page stores. Pages in several folders of one address share the browser's storage, so those of an
// exported page (`webgemma web --export`) carry its folder; others, and one at the root, keep the bare names.

/** Whether this page is an exported folder, with no `webgemma web` behind it. */
export const isHosted = document.documentElement.hasAttribute("data-hosted");

const folder = new URL("./", import.meta.url).pathname;

/** Return the name of a database, a channel or an entry of localStorage for this page. */
export const scoped = (name) => (isHosted && folder !== "/" ? `${name} ${folder}` : name);
