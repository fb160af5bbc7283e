(() => {
  const data = JSON.parse(find("#data").textContent);
  const models = data.models;
  const LIVE = 20000; // characters; a longer text would make typing slow
  const can = (model, verb) => models[model].can.includes(verb);
  const each = (work) => Promise.all(models.map((model, number) => work(model, number)));
  const heading = (model) => (models.length > 1 ? [element("h2", {}, model.name)] : []);
  const said = (model, message, kind = "soft") => element("div", { class: "card" }, ...heading(model), element("p", { class: kind }, message));

  // Tabs, by mouse, arrow keys or address.
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const verbs = { check: "detect", fill: "fill", score: "score", near: "embed", predict: "predict" };
  const updates = {};
  const select = (tab, focus) => {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", chosen);
      other.tabIndex = chosen ? 0 : -1;
      find(`#${other.getAttribute("aria-controls")}`).hidden = !chosen;
    }
    const name = tab.getAttribute("aria-controls");
    if (focus) tab.focus();
    history.replaceState(null, "", `#${name}`);
    if (updates[name]) updates[name]();
  };
  for (const tab of tabs) {
    const verb = verbs[tab.getAttribute("aria-controls")];
    if (!models.some((_, number) => can(number, verb))) {
      tab.dataset.lacks = "";
      tab.setAttribute("aria-label", `${tab.textContent}: not available with this model`);
      tab.title = models[0].lacks[verb];
    }
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length], true);
    });
  }

  // Words. Offsets of the server count code points; those of a textarea count UTF-16 units.
  const joins = /[\p{L}\p{M}\p{N}_]/u, han = /\p{Script=Han}/u;
  const wordsOf = (points, found) => {
    const words = [];
    found.offsets.forEach(([start, end], number) => {
      const p = found.replaced_probability[number], last = words[words.length - 1];
      const inside = (at) => joins.test(points[at]) && !han.test(points[at]);
      if (last && start < end && (start < last.end || (start === last.end && inside(start) && inside(start - 1)))) {
        last.end = Math.max(last.end, end);
        last.p = Math.max(last.p, p);
      } else if (start < end) words.push({ start, end, p });
    });
    return words.map((word) => ({ ...word, marked: word.p >= found.threshold }));
  };
  const shade = (place, points, words, chosen) => {
    const parts = [];
    let done = 0;
    for (const word of words) {
      if (word.start > done) parts.push(points.slice(done, word.start).join(""));
      const style = `token${word.marked ? " marked" : ""}${chosen && chosen.start === word.start ? " chosen" : ""}`;
      const made = element("span", { class: style, title: percent(word.p), style: { "--p": word.p.toFixed(3) } }, points.slice(word.start, word.end).join(""));
      made.dataset.start = word.start;
      parts.push(made);
      done = word.end;
    }
    parts.push(points.slice(done).join(""), "\u200b");
    place.replaceChildren(...parts);
  };

  // Check
  const text = find("#check-text"), panel = find("#panel");
  const state = models.map(() => ({ points: [], words: [] }));
  let chosen = null;
  const column = (number) => find(`#check [data-model="${number}"]`);
  const show = (number) => shade(find(".behind", column(number)), state[number].points, state[number].words, chosen);
  // Until the answer arrives, words before and after the change keep their shades.
  const keep = (points) => {
    state.forEach((known, number) => {
      const old = known.points;
      let head = 0, tail = 0;
      while (head < Math.min(old.length, points.length) && old[head] === points[head]) head++;
      while (tail < Math.min(old.length, points.length) - head && old[old.length - 1 - tail] === points[points.length - 1 - tail]) tail++;
      const shift = points.length - old.length;
      const kept = known.words.flatMap((word) => {
        if (word.end < head) return [word];
        return word.start > old.length - tail ? [{ ...word, start: word.start + shift, end: word.end + shift }] : [];
      });
      state[number] = { points, words: kept };
      show(number);
    });
  };
  const summarize = (number, message) => { find(".summary", column(number)).textContent = message; };
  const list = (number) => {
    const { points, words } = state[number];
    const worst = [...words].sort((a, b) => b.p - a.p).filter((word) => word.marked).slice(0, 8);
    find(".chips", column(number)).replaceChildren(...worst.map((word) => {
      const name = points.slice(word.start, word.end).join("");
      const button = element("button", { type: "button" }, element("bdi", {}, name), element("small", {}, percent(word.p)));
      button.addEventListener("click", () => choose(word.start));
      return element("li", {}, button);
    }));
    const count = words.filter((word) => word.marked).length;
    if (!words.length) return summarize(number, "");
    const highest = Math.max(...words.map((word) => word.p));
    summarize(number, count ? `${count} of ${words.length} words look replaced.` : `No word of ${words.length} looks replaced; the highest probability is ${percent(highest)}.`);
  };
  const check = newest(async () => {
    const value = text.value, points = Array.from(value);
    if (points.length > LIVE) {
      state.forEach((_, number) => {
        state[number] = { points: [], words: [] };
        show(number);
        list(number);
        summarize(number, `${points.length.toLocaleString("en")} characters: this page checks up to ${LIVE.toLocaleString("en")}. For longer texts: discern detect MODEL FILE --html page.html`);
      });
      return;
    }
    await each(async (model, number) => {
      if (!can(number, "detect")) return summarize(number, `Nothing is shaded: ${model.lacks.detect}.`);
      try {
        const found = value.trim() ? await ask("detect", { text: value, model: number }) : { offsets: [], replaced_probability: [], threshold: 1 };
        if (text.value === value) {
          state[number] = { points, words: wordsOf(points, found) };
          show(number);
          list(number);
        }
      } catch (problem) { summarize(number, problem.message); }
    });
  });
  text.addEventListener("input", () => {
    const points = text.value.length > 2 * LIVE ? [] : Array.from(text.value);
    chosen = null;
    panel.hidden = true;
    if (points.length <= LIVE) keep(points);
    check();
  });
  const points = (value) => Array.from(value).length;
  const cursor = () => points(text.value.slice(0, text.selectionStart));
  const wordAt = (place) => state.flatMap((known) => known.words).find((word) => word.start <= place && place <= word.end);
  const choose = async (place) => {
    const word = wordAt(place);
    if (!word) return;
    chosen = word;
    models.forEach((_, number) => show(number));
    const value = text.value, known = Array.from(value), name = known.slice(word.start, word.end).join("");
    find(".word bdi", panel).textContent = name;
    const columns = models.map((model, number) => {
      const mine = state[number].words.find((other) => other.start === word.start);
      const replaced = mine ? `Replaced with probability ${percent(mine.p)}${mine.marked ? ", marked" : ""}.` : "";
      return element("div", {}, ...heading(model), element("p", {}, replaced), element("p", { class: "soft" }, can(number, "fill") ? "Asking the generator …" : `No suggestions: ${model.lacks.fill}.`));
    });
    find(".columns", panel).replaceChildren(...columns);
    panel.hidden = false;
    panel.scrollIntoView({ block: "nearest" });
    await each(async (_, number) => {
      if (!can(number, "fill")) return;
      const status = columns[number].lastElementChild;
      try {
        const found = await ask("alternatives", { text: value, start: word.start, end: word.end, top: 6, model: number });
        status.textContent = "The generator suggests:";
        columns[number].append(bars(found.alternatives.map((one) => [one.text, one.probability]), (put) => {
          if (text.value !== value) return;
          text.setRangeText(put, known.slice(0, word.start).join("").length, known.slice(0, word.end).join("").length, "end");
          text.dispatchEvent(new Event("input"));
          text.focus();
        }));
      } catch (problem) { status.textContent = problem.message; }
    });
  };
  const bars = (pairs, put) => element("ol", { class: "bars" }, ...pairs.map(([name, p], at) => {
    const label = put ? element("button", { type: "button", title: `Replace it with “${name}”` }, element("bdi", {}, name)) : element("bdi", {}, name);
    if (put) label.addEventListener("click", () => put(name, at));
    return element("li", {}, label, element("span", {}, percent(p)), element("i", { style: { "--p": p.toFixed(4) } }));
  }));
  text.addEventListener("click", () => choose(cursor()));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.ctrlKey) { event.preventDefault(); choose(cursor()); }
  });
  find("#check").addEventListener("click", (event) => {
    const token = event.target.closest(".reading .token");
    if (token) choose(Number(token.dataset.start));
  });
  const close = () => {
    panel.hidden = true;
    chosen = null;
    models.forEach((_, number) => show(number));
    text.focus();
  };
  find("[data-close]").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !panel.hidden) close(); });

  // Fill in
  const masked = find("#fill-text"), results = (name) => find(`#${name} .results`);
  const perModel = (name, verb, work) => newest(async () => {
    const made = await each(async (model, number) => {
      if (!can(number, verb)) return said(model, `Not available with this model: ${model.lacks[verb]}.`);
      try { return element("div", { class: "card" }, ...heading(model), ...(await work(model, number))); } catch (problem) { return said(model, problem.message, "error"); }
    });
    results(name).replaceChildren(...made);
  });
  const MASK = "[MASK]";
  updates.fill = perModel("fill", "fill", async (_, number) => {
    if (!masked.value.includes(MASK)) return [element("p", { class: "soft" }, "Write [MASK] where a token is to be predicted.")];
    const found = (await ask("fill", { text: masked.value, model: number, top: 8 })).predictions;
    const lists = found.length && Array.isArray(found[0]) ? found : [found];
    return lists.flatMap((predictions, place) => [
      element("h3", {}, lists.length > 1 ? `Mask ${place + 1}` : "Most likely tokens"),
      bars(predictions.map((one) => [one.token.startsWith("##") || one.text.includes("\ufffd") ? one.token : one.text.trim() || one.token, one.probability]), (_, at) => put(place, predictions[at].text)),
    ]);
  });
  const put = (place, added) => {
    let at = -1;
    for (let number = 0; number <= place; number++) at = masked.value.indexOf(MASK, at + 1);
    if (at < 0 || added.includes("\ufffd")) return; // a part of a character is no text
    const before = !added.startsWith(" ") && masked.value[at - 1] === " " ? at - 1 : at;
    masked.setRangeText(added.trim(), before, at + MASK.length, "end");
    masked.focus();
    updates.fill();
  };
  masked.addEventListener("input", () => updates.fill());
  find("#fill-mask").addEventListener("click", () => { masked.setRangeText(MASK, masked.selectionStart, masked.selectionEnd, "end"); masked.focus(); updates.fill(); });

  // Score
  const pair = [find("#score-a"), find("#score-b")];
  const number = (value) => value.toFixed(2).replace("-", "\u2212");
  updates.score = perModel("score", "score", async (_, model) => {
    const found = await ask("score", { texts: pair.map((box) => box.value), model });
    const [a, b] = found.scores, gap = Math.abs(a - b);
    // The sum of scorer "rtd" grows with the number of tokens, whatever they are.
    const tokens = found.scores.map((score, at) => Math.round(score / found.scores_per_token[at]));
    const comparable = found.scorer !== "rtd" || tokens[0] === tokens[1];
    const verdict = !comparable ? "Scorer rtd only compares sentences with the same number of tokens." : gap < 0.005 ? "Both are equally likely." : `The ${a > b ? "first" : "second"} sentence is more likely, by ${gap.toFixed(2)} nats.`;
    const row = (name, at) => element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, number(found.scores[at])), element("td", { class: "number" }, number(found.scores_per_token[at])), element("td", {}, comparable && at === (a > b ? 0 : 1) && gap >= 0.005 ? "likelier" : ""));
    const head = ["Sentence", "Score (nats)", "Per token", ""].map((title, place) => (title ? element("th", { scope: "col", class: place ? "number" : null }, title) : element("td")));
    return [element("p", { class: "answer" }, verdict), element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, row("First", 0), row("Second", 1))), element("p", { class: "soft" }, `${found.quantity}; scorer ${found.scorer}. Higher is likelier.`)];
  });
  for (const box of pair) box.addEventListener("input", () => updates.score());

  // Find similar
  const searched = find("#near-text"), query = find("#near-query");
  const vectors = models.map(() => new Map());
  const MOST_SENTENCES = 2000;
  let beginningOnly = false;
  const sentencesOf = (value) => [...new Set(value.split(/(?<=[\u3002\uff01\uff1f])\s*|(?<=[.!?])\s+|\n+/u).map((line) => line.trim()).filter(Boolean))];
  const embed = async (model, texts) => {
    const known = vectors[model];
    const missing = texts.filter((one) => !known.has(one));
    while (missing.length) {
      const block = [];
      for (let characters = 0; missing.length && block.length < 64 && characters < 50000; characters += block[block.length - 1].length) block.push(missing.shift());
      const found = await ask("embed", { texts: block, model });
      block.forEach((one, place) => {
        const length = Math.hypot(...found.vectors[place]) || 1;
        known.set(one, found.vectors[place].map((value) => value / length));
      });
    }
    return texts.map((one) => known.get(one));
  };
  updates.near = perModel("near", "embed", async (_, model) => {
    const all = sentencesOf(searched.value), sentences = all.slice(0, MOST_SENTENCES);
    if (!sentences.length || !query.value.trim()) return [element("p", { class: "soft" }, "Enter a text to search, and a sentence to compare it with.")];
    const [mine, ...others] = await embed(model, [query.value.trim(), ...sentences]);
    const near = sentences.map((one, place) => [one, others[place].reduce((sum, value, at) => sum + value * mine[at], 0)]);
    near.sort((one, other) => other[1] - one[1]);
    const rows = near.slice(0, 10).map(([one, cosine]) => element("li", {}, element("bdi", {}, one), element("span", {}, cosine.toFixed(3)), element("i", { style: { "--p": Math.max(0, cosine).toFixed(3) } })));
    const grouped = (count) => `${count.toLocaleString("en")} sentence${count === 1 ? "" : "s"}`;
    const left = all.length > sentences.length ? `; ${grouped(all.length - sentences.length)} more left out` : beginningOnly ? "; only the beginning of the file was read" : "";
    return [element("h3", {}, `Nearest of ${grouped(sentences.length)}, by cosine${left}`), element("ol", { class: "bars long" }, ...rows)];
  });
  let typing = 0;
  const later = () => { clearTimeout(typing); typing = setTimeout(() => updates.near(), 250); };
  searched.addEventListener("input", () => { beginningOnly = false; later(); });
  query.addEventListener("input", later);
  const read = async (file) => {
    if (!file) return;
    const text = await file.slice(0, 1 << 20).text();
    searched.value = text.slice(0, 500000);
    beginningOnly = file.size > 1 << 20 || text.length > 500000;
    updates.near();
  };
  find("#near-file").addEventListener("change", (event) => read(event.target.files[0]));
  searched.addEventListener("dragover", (event) => { event.preventDefault(); searched.classList.add("over"); });
  searched.addEventListener("dragleave", () => searched.classList.remove("over"));
  searched.addEventListener("drop", (event) => {
    searched.classList.remove("over");
    if (event.dataTransfer.files.length) { event.preventDefault(); read(event.dataTransfer.files[0]); }
  });

  // Predict
  const tasks = [...new Map(models.flatMap((model) => model.tasks).map((task) => [task.name, task])).values()];
  const task = find("#predict-task"), input = find("#predict-text"), second = find("#predict-pair");
  task.append(...tasks.map((one) => element("option", { value: one.name }, one.name)));
  find("#predict-tasks").hidden = tasks.length < 2;
  const current = () => tasks[task.selectedIndex] || tasks[0];
  const arrange = () => {
    // Of models with tasks of the same name, one may read questions or pairs and another words.
    const all = models.flatMap((model) => model.tasks).filter((one) => current() && one.name === current().name);
    const kinds = all.map((one) => one.reads);
    const reads = kinds.includes("question") ? "question" : kinds[0] || "text";
    find("#predict-label").textContent = reads === "question" ? "Text that contains the answer" : reads === "words" ? "Text, with spaces between its words" : "Text";
    find("#predict-pair-label").textContent = reads === "question" ? "Question" : "Second text, if the task reads pairs";
    find("#predict-second").hidden = kinds.every((kind) => kind === "words");
  };
  const entities = (found) => {
    const parts = [];
    const starts = new Map((found.spans || []).map((span) => [span[0], span]));
    for (let at = 0; at < found.words.length;) {
      const span = starts.get(at) || (found.spans ? null : [at, at + 1, found.tags[at]]);
      const words = found.words.slice(at, span ? span[1] : at + 1).join(" ");
      parts.push(span ? element("span", { class: "entity right" }, words, element("small", {}, span[2])) : words, " ");
      at = span ? span[1] : at + 1;
    }
    return element("p", { class: "text" }, ...parts);
  };
  const answered = (found, labels) => {
    if (found.words) return [entities(found)];
    if (found.nbest) {
      const best = found.nbest.slice(0, 5).map((one) => [one.text, one.probability]);
      return [element("p", { class: "answer" }, found.answer || "No answer"), bars(best)];
    }
    if (found.score !== undefined) return [element("p", { class: "answer" }, found.score.toFixed(3))];
    const pairs = Object.entries(found.probabilities || {}).sort((one, other) => other[1] - one[1]);
    const shown = found.label !== undefined ? found.label : found.labels.join(", ") || "None of the labels";
    const sure = found.label !== undefined ? [element("small", {}, `confidence ${percent(found.probabilities[found.label])}`)] : [];
    return [element("p", { class: "answer" }, element("bdi", {}, String(shown)), ...sure), bars(pairs.slice(0, 12))];
  };
  updates.predict = perModel("predict", "predict", async (model, number) => {
    const chosen = model.tasks.find((one) => one.name === current().name);
    if (!chosen) return [element("p", { class: "soft" }, `This model was not fine-tuned on ${current().name}.`)];
    if (!input.value.trim()) return [element("p", { class: "soft" }, "Type a text above.")];
    const body = chosen.reads === "question" ? { question: second.value, context: input.value } : second.value.trim() && chosen.reads === "text" ? [input.value, second.value] : input.value;
    const found = (await ask("predict", { text: body, model: number, task: model.tasks.length > 1 ? chosen.name : null })).predictions[0];
    return answered(found);
  });
  task.addEventListener("change", () => { arrange(); updates.predict(); });
  for (const box of [input, second]) box.addEventListener("input", () => updates.predict());
  arrange();

  text.value = models.some((_, place) => can(place, "detect")) ? "The station was opened on 1 May 1895 and the was closed in 1964. The book became one of the most popular songs of the author because century." : "";
  keep(Array.from(text.value));
  check();
  const useful = tabs.find((tab) => tab.dataset.lacks === undefined) || tabs[0];
  const follow = () => select(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) || useful);
  addEventListener("hashchange", follow);
  follow();
})();
