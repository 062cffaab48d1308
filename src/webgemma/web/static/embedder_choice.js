// What the dialog of the documents says of the embedding model, and the buttons that choose one.

import { button, element } from "./dom.js";
import { t } from "./language.js";

/** Whether a model's name says that it embeds: EmbeddingGemma's do. */
export const isEmbeddingName = (name) => /embed/i.test(name);

/** An element that says how passages are found; `choose(model)` and `drop()` change it. */
export class EmbedderChoice {
  constructor({ choose, drop }) {
    this.choose = choose;
    this.drop = drop;
    this.state = element("p");
    this.state.role = "status";
    this.problem = element("p", "problem");
    this.acts = element("div", "acts");
    this.element = element("div", "", this.state, this.problem, this.acts);
  }

  /**
   * Show the chosen model (null: none), whether it `isLoading`, what is wrong with it, and the models [{name, …}] that
   * may be chosen; `help` says how to add one.
   */
  show({ name, isLoading = false, problem = "", models, help, extra = [] }) {
    const states = {
      loading: () => t("{name} is being loaded …", { name }),
      chosen: () => t("By meaning, with {name}; until all passages are embedded, by their words.", { name }),
      none: () => `${t("By their words: passages that share words with your message.")} ${help}`,
    };
    this.state.textContent = states[isLoading ? "loading" : name ? "chosen" : "none"]();
    this.problem.textContent = problem;
    const others = models.filter((model) => model.name !== name);
    this.acts.replaceChildren(
      ...others.map((model) => button(t("Use {name}", model), "", () => this.choose(model))),
      ...(name ? [button(t("Search by words"), "quiet", () => this.drop())] : []),
      ...extra,
    );
    for (const each of this.acts.querySelectorAll("button")) each.disabled = isLoading;
  }
}
