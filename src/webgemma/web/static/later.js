// Work that may wait (formulas, colours of code): done at once while there is time, else between other things, so that
// a long text never holds up the page.

const SLICE_MILLISECONDS = 8; // of work in a row

let tasks = [];
let next = 0; // the first task that is not done
let spent = 0; // milliseconds of the current slice
let timer = 0;
const loads = new Set(); // promises of what tasks wait for

function run(task) {
  const start = performance.now();
  try {
    task();
  } finally {
    spent += performance.now() - start;
    timer ||= setTimeout(continueTasks);
  }
}

function continueTasks() {
  timer = 0;
  spent = 0;
  while (next < tasks.length && spent < SLICE_MILLISECONDS) {
    next += 1;
    run(tasks[next - 1]);
  }
  if (next === tasks.length) {
    tasks = [];
    next = 0;
  }
}

/** Run a task now if there is time, else soon, after those that wait already. */
export function soon(task) {
  if (!tasks.length && spent < SLICE_MILLISECONDS) return run(task);
  tasks.push(task);
  timer ||= setTimeout(continueTasks);
}

/** Run a task with the value of a promise soon after it is fulfilled; if it is rejected (offline), not at all. */
export function soonAfter(promise, task) {
  const load = promise.then((value) => soon(() => task(value)), () => {}).finally(() => loads.delete(load));
  loads.add(load);
}

/** Wait until no task waits. */
export async function allDone() {
  while (loads.size || tasks.length) {
    await Promise.allSettled(loads);
    await new Promise((resolve) => setTimeout(resolve));
  }
}
