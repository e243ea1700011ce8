// The place in the page: every view has a link that restores it.

// Read #/runs?query or #/run/ID/view/argument?query.
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [kind, run = null, view = "charts", argument = null] = path.split("/").map(decoded);
  return {...(kind === "run" ? {view, run, argument} : {view: kind || "runs", run: null, argument: null}), query: new URLSearchParams(query ?? "")};
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// The link to a place; `query` is an object or URLSearchParams. Lists repeat a name; empty values are left out.
export function link(view, run = null, argument = null, query = {}) {
  const path = run === null ? [view] : ["run", run, view, argument].filter((part) => part !== null);
  const given = query instanceof URLSearchParams ? [...query] : Object.entries(query);
  const pairs = given.flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const text = new URLSearchParams(pairs.filter(([, value]) => value || value === 0)).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text && "?"}${text}`;
}

// The runs beside the shown one, which a link keeps through all views.
export const besideOf = (query) => ({with: query.getAll("with")});

// The link to this place with some parameters changed.
export function changed(changes, {view, run, argument, query} = here()) {
  const others = [...query].filter(([name]) => !(name in changes));
  const added = Object.entries(changes).flatMap(([name, value]) => [value].flat().map((each) => [name, each ?? ""]));
  return link(view, run, argument, new URLSearchParams([...others, ...added]));
}

export const go = (href) => (location.hash = href);

// Change the link without a step in the browser's history, for example while typing.
export function replace(href) {
  history.replaceState(null, "", href);
  dispatchEvent(new HashChangeEvent("hashchange"));
}
