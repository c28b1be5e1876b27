// What pi makes of a session: node load.mjs PACKAGE FILE, as one JSON value. See make.mjs.
import { join, resolve } from "path";

const [pack, file] = process.argv.slice(2);
const { SessionManager } = await import(join(resolve(pack), "dist/core/session-manager.js"));
const session = SessionManager.open(resolve(file));
const entries = session.getEntries();
console.log(
  JSON.stringify({
    header: session.getHeader(),
    entries,
    leaf: session.getLeafId(),
    branch: session.getBranch().map((entry) => entry.id),
    context: session.buildSessionContext(),
    name: session.getSessionName() ?? null,
    labels: Object.fromEntries(entries.filter((entry) => session.getLabel(entry.id)).map((entry) => [entry.id, session.getLabel(entry.id)])),
  }),
);
