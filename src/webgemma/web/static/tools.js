// The tools that a model may call on this page, and who is asked before. All of them are off until the user switches
// them on for a conversation; each call of Python asks, unless the user has allowed all in this conversation.
//
// What a tool returns, or what is wrong with a call, goes to the model as text, in English as its own words.

import { calculate } from "./calculator.js";
import { tellTime } from "./clock.js";
import { t } from "./language.js";
import { runPython } from "./python_tool.js";

const DECLINED = "The user declined this call.";

const declared = (name, description, properties, required) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties, required, additionalProperties: false } },
});
const text = (description) => ({ type: "string", description });
const whole = (description) => ({ type: "integer", description });

/**
 * By name: label() and help() for the user, the declaration for the model, run(arguments, folder, signal), which
 * returns {text, hasFailed?} or throws, isAsking: whether the user is asked before, and needsPyodide.
 */
export const TOOLS = {
  calculator: {
    label: () => t("Calculator"),
    help: () => t("Sums, percentages, powers and functions, exactly"),
    declaration: declared(
      "calculator",
      "Computes an arithmetic expression exactly, with numbers of any length. Operators: + - * / // (whole division) "
      + "^ (power) % (percent, or the remainder before a number) ! and parentheses; `15% of 80`, `80 + 15%`. Functions: "
      + "sqrt root abs round(x, decimals) floor ceil min max sum mean gcd lcm ncr npr exp ln log(x, base) sin cos tan "
      + "asin acos atan radians degrees; pi, e. Angles are in radians. A result after ≈ is rounded.",
      { expression: text("For example (3 + 4.5) * 2^10") },
      ["expression"],
    ),
    run: ({ expression }) => ({ text: calculate(expression) }),
  },
  clock: {
    label: () => t("Clock"),
    help: () => t("Date, time, time zones and the days between dates"),
    declaration: declared(
      "clock",
      "Tells the current date and time with weekday and week, in any time zone; or the same of a given date, of a date "
      + "with days or months added, and how long it is until another date.",
      {
        time_zone: text("A name such as Europe/Berlin or UTC; without it, the user's time zone"),
        date: text("As 2026-12-24 or 2026-12-24T18:30; without it, now"),
        add_days: whole("Days to add to the date; negative: to subtract"),
        add_months: whole("Months to add to the date; negative: to subtract"),
        until: text("Another date, to tell what lies between"),
      },
      [],
    ),
    run: (given) => ({ text: tellTime(given) }),
  },
  python: {
    label: () => t("Python"),
    help: () => t("Runs programs in this tab, without network or files; asks before each"),
    isAsking: true,
    needsPyodide: true,
    declaration: declared(
      "python",
      "Runs a Python 3 program and returns what it prints, and the value of its last line. It has the standard library "
      + "only, no network, no files of the user and 20 seconds; nothing remains from one call to the next.",
      { code: text("The program") },
      ["code"],
    ),
    run: (given, folder, signal) => runPython(given, folder, signal),
  },
};

export const labelOf = (name) => (Object.hasOwn(TOOLS, name) ? TOOLS[name].label() : name);

/** The tools of the page; `about` is a promise of what its server says of itself. Dispatches "changed". */
export class ToolBox extends EventTarget {
  constructor(about) {
    super();
    this.folder = null; // the address of Pyodide's files, if the server has them
    this.answers = new Map(); // by call that asks: takes the answer
    this.allowed = new WeakSet(); // conversations in which Python runs without asking, until the page is closed
    about.then(({ pyodide }) => {
      this.folder = pyodide ?? null;
      this.dispatchEvent(new Event("changed"));
    }, () => {}); // nothing responds
  }

  /** The names of the tools that this page has. */
  get available() {
    return Object.keys(TOOLS).filter((name) => !TOOLS[name].needsPyodide || this.folder);
  }

  /** Return the names of the tools that are on in a conversation. */
  on({ tools = [] }) {
    return this.available.filter((name) => tools.includes(name));
  }

  /** Switch a tool on or off in a conversation. */
  set(conversation, name, isOn) {
    const others = (conversation.tools ?? []).filter((other) => other !== name);
    conversation.tools = isOn ? [...others, name] : others;
    conversation.tooled = Date.now();
    if (!isOn && TOOLS[name].isAsking) this.allowed.delete(conversation);
  }

  /** Return the settings by which a model may call tools; `isLast`: they are in the prompt, but it may call none. */
  settings(names, isLast) {
    if (!names.length) return {};
    return { tools: names.map((name) => TOOLS[name].declaration), ...(isLast && { tool_choice: "none" }) };
  }

  /** Make a call, of one of the tools that were offered: note its state and its result in it, and call `changed`. */
  async make(call, { conversation, offered, signal, changed }) {
    const note = (facts) => {
      if (signal.aborted) return; // the call was stopped, and is noted as such
      Object.assign(call, facts);
      changed();
    };
    if (!offered.includes(call.name)) {
      note({ state: "failed", result: `Error: there is no tool of this name. There are: ${offered.join(", ")}.` });
      return;
    }
    const tool = TOOLS[call.name];
    if (tool.isAsking && !this.allowed.has(conversation)) {
      note({ state: "asking" });
      const answer = await this.answer(call, signal);
      if (answer === "always") this.allowed.add(conversation);
      if (answer === "no") note({ state: "refused", result: DECLINED });
      if (answer === "no" || signal.aborted) return;
    }
    note({ state: "running" });
    const start = performance.now();
    const facts = await this.run(tool, call, signal);
    note({ ...facts, seconds: (performance.now() - start) / 1000 });
  }

  async run(tool, { arguments: given }, signal) {
    try {
      const { text: result, hasFailed = false } = await tool.run(given, this.folder, signal);
      return { state: hasFailed ? "failed" : "done", result };
    } catch (error) {
      return { state: "failed", result: `Error: ${error.message}` };
    }
  }

  /** Return a promise of the user's answer to a call that asks: "once", "always" or "no". */
  answer(call, signal) {
    return new Promise((resolve) => {
      const take = (answer) => {
        this.answers.delete(call);
        resolve(answer);
      };
      this.answers.set(call, take);
      signal.addEventListener("abort", () => take("stopped"), { once: true });
      this.dispatchEvent(new Event("asking"));
    });
  }

  /** Whether a call waits for the user's answer in this tab. */
  isAsking(call) {
    return this.answers.has(call);
  }

  give(call, answer) {
    this.answers.get(call)?.(answer);
  }
}
