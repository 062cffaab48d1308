// The question dialog: to confirm something, or to enter a line of text.

import { byId } from "./dom.js";
import { t } from "./language.js";

async function ask(text, yes, value, name = t("Title")) {
  const dialog = byId("question");
  const answer = byId("question-answer");
  const hasInput = value !== null;
  byId("question-text").textContent = text;
  byId("question-yes").textContent = yes;
  byId("question-answer-label").hidden = !hasInput;
  byId("question-answer-name").textContent = name;
  answer.value = value ?? "";
  dialog.returnValue = "no";
  dialog.showModal();
  if (hasInput) answer.select();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes" ? answer.value : null;
}

byId("question-answer").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault(); // the first button of the form is Cancel
  byId("question").close("yes");
});

/** Return whether the user confirms; `yes` is the label of the button. */
export const confirmed = async (text, yes) => (await ask(text, yes, null)) !== null;

/** Return the line that the user enters, or null if the dialog is cancelled; `name` is the label of the box. */
export const askLine = (text, yes, value, name) => ask(text, yes, value, name);
