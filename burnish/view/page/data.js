// All data come through `get`: from the server, or in a frozen report from answers stored in the page.

const inlined = document.getElementById("frozen"), answers = inlined && JSON.parse(inlined.textContent);
export const frozen = answers !== null;

let requests = new AbortController();

// Drop pending answers, because another view is shown.
export function forget() {
  requests.abort();
  requests = new AbortController();
}

// Return the answer to a path below api/. Lists repeat the parameter; empty parameters are left out.
export async function get(path, parameters = {}) {
  if (frozen) return kept(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") query.append(name, each);
  }
  const response = await fetch(`api/${path}?${query}`, {signal: requests.signal}), body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error.problem), body.error, {status: response.status});
  return body;
}

function kept(path, wanted) {
  const answer = answers[path] ?? {};
  if (path === "rollout") return answers.rollouts.rows.find((row) => row.id === wanted.id);
  if (path === "metrics" && !wanted.names) {
    return Object.fromEntries(Object.entries(answer).map(([run, series]) => [run, {names: Object.keys(series)}]));
  }
  if (path !== "rollouts") return answer;
  const same = (row, name, field) => [undefined, String(row[field])].includes(wanted[name]?.toString());
  return {...answer, rows: answer.rows.filter((row) => same(row, "step", "step") && same(row, "prompt", "prompt_index"))};
}

// Call `grown(run)` when a run has new steps, and `connected(yes)` when the server comes or goes.
// A browser opens few connections to a server, so only a visible page holds one.
export function listen(grown, connected) {
  if (frozen) return;
  let source = null;
  const follow = () => {
    source?.close();
    source = document.hidden ? null : new EventSource("api/live");
    if (!source) return;
    source.onopen = () => connected(true);
    source.onerror = () => connected(false);
    source.onmessage = (event) => grown(JSON.parse(event.data).run);
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", follow);
}
