// The theme, and whether the sidebar is hidden: applied before the first paint (so this is not a module). The theme is
// chosen in the sidebar; sidebar.js hides that.
"use strict";

{
  const KEY = "webgemma.theme";
  const stored = (key) => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage is forbidden
    }
  };
  const chosen = () => {
    const theme = stored(KEY);
    return ["light", "dark"].includes(theme) ? theme : "system";
  };
  const apply = () => { document.documentElement.dataset.theme = chosen(); };
  apply();
  document.documentElement.dataset.sidebar = stored("webgemma.sidebar") === "hidden" ? "hidden" : "";
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = chosen();
    addEventListener("storage", () => { // changed in another tab
      apply();
      choice.value = chosen();
    });
    choice.addEventListener("change", () => {
      document.documentElement.dataset.theme = choice.value;
      try { localStorage.setItem(KEY, choice.value); } catch { /* it lasts until the page is closed */ }
    });
  });
}
