// Whether a model fits this GPU, as far as the GPU tells.

/** In words; "" where it is not known. */
export function fitOf({ gpu_nbytes: all, gpu_least_nbytes: least }, roomNbytes) {
  if (all === null || all === undefined || roomNbytes === null) return "";
  if (all <= roomNbytes) return "fits";
  return (least ?? all) <= roomNbytes ? "fits, a little slower" : TOO_LARGE;
}

export const TOO_LARGE = "too large for this GPU";

/** How many bytes the GPU can give, asked of the worker. */
export class Room {
  constructor(engine) {
    this.engine = engine;
    this.nbytes = null; // not known
    engine.addEventListener("room", ({ detail }) => { this.nbytes = detail.nbytes; });
  }

  /** Ask for the most that any of the models needs; the promise is kept when the answer comes. */
  async ask(models) {
    const most = Math.max(0, ...models.map((model) => model.gpu_nbytes ?? 0));
    if (!most) return;
    const told = new Promise((resolve) => this.engine.addEventListener("room", resolve, { once: true }));
    this.engine.askRoom(most);
    await told;
  }
}
