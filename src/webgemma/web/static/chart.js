// The chart of a training's losses, drawn again after every step.

import { element } from "./dom.js";
import { decimal, t } from "./language.js";

const WIDTH = 320;
const HEIGHT = 120;
const MAX_POINTS = 300;
const MARGIN = { left: 34, right: 8, top: 8, bottom: 18 };

function svgElement(tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

const minimum = (values) => values.reduce((a, b) => Math.min(a, b)); // Math.min(...values) has an argument limit

/** Return the points of the line; many steps are averaged in groups. */
function points(losses) {
  const size = Math.ceil(losses.length / MAX_POINTS);
  return Array.from({ length: Math.ceil(losses.length / size) }, (_, at) => {
    const group = losses.slice(at * size, (at + 1) * size);
    return { step: at * size + (group.length + 1) / 2, loss: group.reduce((a, b) => a + b) / group.length };
  });
}

/** Return what the chart shows as text. */
function description(losses, heldOut, steps) {
  const text = t("Loss after {step} of {steps} steps: {loss}, first {first}, lowest {lowest}.", {
    step: losses.length, steps, loss: decimal(losses.at(-1), 2), first: decimal(losses[0], 2), lowest: decimal(minimum(losses), 2),
  });
  return heldOut.length ? `${text} ${t("Held-out loss: {loss}.", { loss: decimal(heldOut.at(-1).loss, 2) })}` : text;
}

/** Return the content of a figure: a loss for each step, and held-out losses [{step, loss}]. */
export function lossChart(losses, heldOut, steps) {
  const means = points(losses);
  const values = [...means, ...heldOut].map(({ loss }) => loss);
  const [low, high] = [minimum(values), -minimum(values.map((value) => -value))];
  const xOf = (step) => MARGIN.left + ((step - 1) / Math.max(1, steps - 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const yOf = (loss) => MARGIN.top + ((high - loss) / (high - low || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const line = means.map(({ step, loss }) => `${xOf(step).toFixed(1)},${yOf(loss).toFixed(1)}`).join(" ");
  const chart = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": description(losses, heldOut, steps) });
  const foot = HEIGHT - MARGIN.bottom;
  chart.append(
    svgElement("path", { class: "axis", d: `M${MARGIN.left} ${MARGIN.top}V${foot}H${WIDTH - MARGIN.right}` }),
    svgElement("text", { x: MARGIN.left - 4, y: MARGIN.top + 4, "text-anchor": "end" }, decimal(high, 2)),
    svgElement("text", { x: MARGIN.left - 4, y: foot, "text-anchor": "end" }, decimal(low, 2)),
    svgElement("text", { x: WIDTH - MARGIN.right, y: HEIGHT - 5, "text-anchor": "end" }, t("step {step}", { step: steps })),
    svgElement("polyline", { class: "losses", points: line }),
    ...heldOut.map(({ step, loss }) => svgElement("circle", { class: "held-out", cx: xOf(step), cy: yOf(loss), r: 2.5 })),
  );
  const caption = heldOut.length ? t("Loss per step; dots: loss of the held-out rows") : t("Loss per step");
  return [chart, element("figcaption", "faint", caption)];
}
