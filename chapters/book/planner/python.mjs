// The worker, seen from the page: one question at a time.

export class Python {
  #worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
  #waiting = new Map();
  #asked = 0;

  constructor({ ready, failed }) {
    this.#worker.onmessage = ({ data }) => {
      if (data.failed) return failed(data.failed);
      if (data.ready) return ready();
      const { resolve, reject } = this.#waiting.get(data.id);
      this.#waiting.delete(data.id);
      if (data.error) reject(new Error(data.error));
      else resolve(data.text);
    };
    this.#worker.onerror = (event) => {
      event.preventDefault();
      failed(event.message || "its files did not load");
    };
  }

  // The engine's answer, as JSON.
  ask(query, part) {
    return new Promise((resolve, reject) => {
      this.#asked += 1;
      this.#waiting.set(this.#asked, { resolve, reject });
      this.#worker.postMessage({ id: this.#asked, query, part });
    });
  }
}
