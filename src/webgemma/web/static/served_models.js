// The dialog to choose one of the server's models.

import { byId, element, humanSize } from "./dom.js";
import { t } from "./language.js";
import { modelButton } from "./model_button.js";

const NO_MODELS = t("The server offers no models.");

/** The dialog; calls `choose(name)`, and `refresh()`, which reads the list and calls `show`. */
export class ServedModels {
  constructor({ choose, refresh }) {
    this.choose = choose;
    this.refresh = refresh;
    this.dialog = byId("models-dialog");
    byId("model-button").addEventListener("click", () => this.open());
  }

  open() {
    if (!this.dialog.open) this.dialog.showModal();
    this.refresh();
  }

  /** Show models, as server_home.js has them, and what is wrong if they cannot be read. */
  show(models, current, problem) {
    const focused = document.activeElement?.closest("#served .model")?.dataset.name;
    byId("served").replaceChildren(...models.map((model) => element("li", "", this.button(model, current))));
    byId("served-state").textContent = problem || (models.length ? "" : NO_MODELS);
    if (focused === undefined) return; // else the focus stays on the same model
    ([...byId("served").querySelectorAll(".model")].find(({ dataset }) => dataset.name === focused) ?? byId("models-title")).focus();
  }

  button({ name, nbytes, details, state }, current) {
    const { family, parameter_size: parameters, quantization_level: quantisation } = details;
    const facts = [family, parameters, quantisation, state];
    const button = modelButton(name, { size: humanSize(nbytes), facts, isCurrent: name === current }, () => {
      this.dialog.close();
      this.choose(name);
    });
    button.dataset.name = name;
    return button;
  }
}
