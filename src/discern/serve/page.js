"use strict";
// Shared by the pages that answer. Text is only ever put into text nodes.
const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") for (const [property, each] of Object.entries(value)) made.style.setProperty(property, each);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
};
const find = (selector, within = document) => within.querySelector(selector);
const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "under 0.1%");
const trouble = (message) => {
  const place = find("#trouble");
  place.textContent = message || "";
  place.hidden = !message;
};
const ask = async (path, body) => {
  let answer;
  try {
    answer = await fetch(path, body === undefined ? {} : {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
  } catch {
    trouble("The server does not answer. Is it still running?");
    throw new Error("no answer");
  }
  trouble("");
  let found;
  try {
    found = await answer.json();
  } catch {
    throw new Error(`The server answered ${answer.status} without an explanation.`);
  }
  if (!answer.ok) throw new Error(found.error ? found.error.message : `The server answered ${answer.status}.`);
  return found;
};
// Runs the newest request only: while one is on its way, further changes wait, and only the last of them is sent.
const newest = (work) => {
  let running = false, again = false;
  const run = async () => {
    if (running) { again = true; return; }
    running = true;
    try { do { again = false; await work(); } while (again); } finally { running = false; }
  };
  return run;
};
