// A list of which only the items in view exist, so that ten thousand are no slower than ten.

const OVERSCAN = 6;

class VirtualList {
  /**
   * element: what scrolls. height: of each item, in pixels. render: makes the element of an item, given the item and
   * its place.
   */
  constructor(element, height, render) {
    this.element = element;
    this.height = height;
    this.render = render;
    this.items = [];
    this.shown = new Map();
    this.space = h("div", { class: "space", role: "presentation" });
    element.append(this.space);
    let waiting = false;
    element.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        this.draw();
      });
    });
    new ResizeObserver(() => this.draw()).observe(element);
  }

  /** Show other items, or the same ones anew. */
  setItems(items) {
    this.items = items;
    this.space.style.height = `${items.length * this.height}px`;
    for (const element of this.shown.values()) element.remove();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - OVERSCAN);
    const inView = Math.ceil(this.element.clientHeight / this.height);
    const end = Math.min(this.items.length, first + inView + 2 * OVERSCAN);
    for (const [place, element] of this.shown) {
      if (place >= first && place < end) continue;
      element.remove();
      this.shown.delete(place);
    }
    for (let place = first; place < end; place += 1) {
      if (this.shown.has(place)) continue;
      const element = this.render(this.items[place], place);
      element.style.height = `${this.height}px`;
      element.style.transform = `translateY(${place * this.height}px)`;
      this.shown.set(place, element);
      this.space.append(element);
    }
  }

  /** Scroll as little as is needed to have an item in view. */
  reveal(place) {
    const top = place * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.height > scrollTop + clientHeight) this.element.scrollTop = top + this.height - clientHeight;
    this.draw();
  }
}
