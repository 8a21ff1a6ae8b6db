// Search runs in a worker, which browsers refuse to pages that were opened from a disk. There a frame does its work.
// It has what mkdocs-material's search uses of a worker: messages both ways, and importScripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.ready = this.start(new URL(url, location.href).href);
    }

    async start(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(new URL(each, url).href);
      };
      await this.load(url);
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        this.frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
