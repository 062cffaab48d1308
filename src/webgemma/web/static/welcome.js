// What an empty conversation shows: what the model can do, and suggestions to begin with. What is known only when a
// model is loaded comes last, so that nothing moves then.

import { button, byId, element } from "./dom.js";
import { plural, t } from "./language.js";

const FOR_BUNDLED = [ // not translated, as it knows English alone: what it answers well
  "Tell me a story about a brave little cat.",
  "What is 7 + 5?",
  "What is the capital of France?",
  "What can you do?",
];

const suggestionsFor = ({ isBundled, images }) => (isBundled ? FOR_BUNDLED : [
  t("Explain in three sentences why the sky is blue."),
  t("Write a Python program that finds the largest files in a folder."),
  t("Plan a week of simple dinners for two, with a shopping list."),
  images ? t("What is in this picture?") : t("Suggest five names for a small bakery, and say why."),
]);

/** Return what a loaded model takes and does, as short labels. */
const abilitiesOf = ({ images, audio, thinking, context }) => [
  t("Text"),
  images && t("Images"),
  audio && t("Audio"),
  thinking && t("Thinking"),
  context && plural(context, "Context of {count} token", "Context of {count} tokens"),
].filter(Boolean);

/** `actions` has suggest(text, needsPicture) and chooseModel(). */
export class Welcome {
  constructor(actions) {
    this.actions = actions;
    this.content = "";
  }

  /**
   * Show what the home knows of its model: {name, isBundled, isOnly, isReady, images, audio, thinking, context}; null:
   * there is none yet. isOnly: the page has no other one.
   */
  show(model) {
    const content = JSON.stringify(model);
    if (content === this.content) return; // the focus stays on its suggestion
    this.content = content;
    const focused = [...byId("suggestions").querySelectorAll("button")].indexOf(document.activeElement);
    byId("suggestions").replaceChildren(...suggestionsFor(model ?? {}).map((text, i) => this.suggestion(text, model ?? {}, i)));
    byId("suggestions").querySelectorAll("button")[focused]?.focus();
    byId("welcome-model").replaceChildren(...(model ? this.facts(model) : []));
  }

  suggestion(text, { isBundled, images }, i) {
    const needsPicture = !isBundled && images && i === 3;
    const choice = button(text, "suggestion", () => this.actions.suggest(text, needsPicture));
    choice.dir = "auto";
    if (isBundled) choice.lang = "en";
    return element("li", "", choice);
  }

  facts(model) {
    if (model.isBundled) {
      return [
        element("p", "", t("The bundled model is tiny and made to try things: it chats in simple English, tells stories, and knows little.")),
        ...(model.isOnly ? [] : [button(t("Load a real model"), "quiet", () => this.actions.chooseModel())]),
      ];
    }
    if (!model.isReady) return [];
    const list = element("ul", "abilities", abilitiesOf(model).map((name) => element("li", "", name)));
    list.ariaLabel = t("What {name} takes and does", { name: model.name });
    return [element("p", "", model.name), list];
  }
}
