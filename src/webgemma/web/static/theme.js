// Light or dark: runs before the first paint (so it is no module), and serves the choice in the page.
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
  const show = () => { document.documentElement.dataset.theme = chosen(); };
  show();
  addEventListener("storage", show); // chosen in another tab
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = chosen();
    choice.addEventListener("change", () => {
      document.documentElement.dataset.theme = choice.value;
      try { localStorage.setItem(KEY, choice.value); } catch { /* it lasts as long as the page */ }
    });
  });
}
