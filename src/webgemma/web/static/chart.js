// The losses of a training as a line, drawn anew with every step.

import { element } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 120;
const MOST_POINTS = 300;
const MARGIN = { left: 34, right: 8, top: 8, bottom: 18 };

function drawn(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

const least = (values) => values.reduce((a, b) => Math.min(a, b)); // there may be too many for one call

/** The points of a line: of many steps, means of some at a time. */
function points(losses) {
  const size = Math.ceil(losses.length / MOST_POINTS);
  return Array.from({ length: Math.ceil(losses.length / size) }, (_, at) => {
    const some = losses.slice(at * size, (at + 1) * size);
    return { step: at * size + (some.length + 1) / 2, loss: some.reduce((a, b) => a + b) / some.length };
  });
}

/** What the chart shows, in words. */
function described(losses, judged, steps) {
  const said = `Loss after ${losses.length} of ${steps} steps: ${losses.at(-1).toFixed(2)}, `
    + `at first ${losses[0].toFixed(2)}, at best ${least(losses).toFixed(2)}.`;
  return judged.length ? `${said} Of what was held out: ${judged.at(-1).loss.toFixed(2)}.` : said;
}

/** A figure of losses, one for each step, and of what was judged: [{step, loss}]. */
export function lossChart(losses, judged, steps) {
  const means = points(losses);
  const values = [...means, ...judged].map(({ loss }) => loss);
  const [low, high] = [least(values), -least(values.map((value) => -value))];
  const across = (step) => MARGIN.left + ((step - 1) / Math.max(1, steps - 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const down = (loss) => MARGIN.top + ((high - loss) / (high - low || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const line = means.map(({ step, loss }) => `${across(step).toFixed(1)},${down(loss).toFixed(1)}`).join(" ");
  const chart = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": described(losses, judged, steps) });
  const foot = HEIGHT - MARGIN.bottom;
  chart.append(
    drawn("path", { class: "axis", d: `M${MARGIN.left} ${MARGIN.top}V${foot}H${WIDTH - MARGIN.right}` }),
    drawn("text", { x: MARGIN.left - 4, y: MARGIN.top + 4, "text-anchor": "end" }, high.toFixed(2)),
    drawn("text", { x: MARGIN.left - 4, y: foot, "text-anchor": "end" }, low.toFixed(2)),
    drawn("text", { x: WIDTH - MARGIN.right, y: HEIGHT - 5, "text-anchor": "end" }, `step ${steps}`),
    drawn("polyline", { class: "losses", points: line }),
    ...judged.map(({ step, loss }) => drawn("circle", { class: "judged", cx: across(step), cy: down(loss), r: 2.5 })),
  );
  const caption = judged.length ? "Loss of each step; dots: of what was held out" : "Loss of each step";
  return [chart, element("figcaption", "faint", caption)];
}
