// The theme: applied before the first paint (so this is not a module), and chosen in the sidebar.
"use strict";

{
  const KEY = "webgemma.theme";
  const chosen = () => {
    try {
      const theme = localStorage.getItem(KEY);
      return ["light", "dark"].includes(theme) ? theme : "system";
    } catch {
      return "system"; // storage is forbidden
    }
  };
  const apply = () => { document.documentElement.dataset.theme = chosen(); };
  apply();
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
