// Runs the course's own package by Pyodide, away from the page, so that the page never waits.
//
// In: {id, query, part}. Out: {ready: true}, {failed: why}, {id, text} or {id, error}.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const started = start();
started.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: said(error) }));

async function start() {
  const core = Promise.race([failureToCompile(), loadPyodide()]);
  const [python, archive] = await Promise.all([core, fetchArchive()]);
  python.unpackArchive(archive, "zip");
  return python.pyimport("dplab.predict.plan").answer;
}

// Where its core does not load or compile, Pyodide warns on the console and waits for ever.
function failureToCompile() {
  return new Promise((_, reject) => {
    const compile = WebAssembly.instantiateStreaming;
    WebAssembly.instantiateStreaming = (...all) => {
      const compiled = compile.apply(WebAssembly, all);
      compiled.catch(reject);
      return compiled;
    };
  });
}

async function fetchArchive() {
  const response = await fetch(new URL("predict.zip", import.meta.url));
  if (!response.ok) throw new Error(`predict.zip: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
}

onmessage = async ({ data: { id, query, part } }) => {
  try {
    const answer = await started;
    postMessage({ id, text: answer(query, part) });
  } catch (error) {
    postMessage({ id, error: said(error) });
  }
};

function said(error) {
  return String(error?.message ?? error).trim().split("\n").at(-1);
}
