// Keeps the end of the conversation in sight, unless the reader has gone up to read.

const NEAR_PIXELS = 48;

export class Scroller {
  constructor(area, toEndButton) {
    this.area = area;
    this.isAtEnd = true;
    area.addEventListener("scroll", () => {
      this.isAtEnd = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_PIXELS;
      toEndButton.hidden = this.isAtEnd;
    }, { passive: true });
    toEndButton.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.follow());
    for (const part of [area, ...area.children]) observer.observe(part); // a keyboard comes, a picture is there
  }

  toEnd() {
    this.isAtEnd = true;
    this.follow();
  }

  /** Go along with text that has grown. */
  follow() {
    if (this.isAtEnd) this.area.scrollTop = this.area.scrollHeight;
  }
}
