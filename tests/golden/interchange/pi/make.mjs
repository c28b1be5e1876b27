// Sessions that pi's own SessionManager writes: node make.mjs PACKAGE FOLDER
//
// PACKAGE is an installed pi: @earendil-works/pi-coding-agent (1.6.0 made what lies in 1.6.0) or @mariozechner/pi-coding-agent
// (0.73.1). everything.jsonl has each kind of entry, forks, and a second root; fork.jsonl is one path of it. From v1.jsonl and
// v2.jsonl beside this script, which are made by hand, it makes v1.migrated.jsonl and v2.migrated.jsonl.
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "fs";
import { tmpdir } from "os";
import { dirname, join, resolve } from "path";
import { fileURLToPath } from "url";

const [pack, folder] = process.argv.slice(2);
const { SessionManager } = await import(join(resolve(pack), "dist/core/session-manager.js"));
const here = dirname(fileURLToPath(import.meta.url));
const made = mkdtempSync(join(tmpdir(), "pi-"));
mkdirSync(folder, { recursive: true });

const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const cost = { input: 0.1, output: 0.2, cacheRead: 0, cacheWrite: 0, total: 0.3 };
const usage = { input: 10, output: 5, cacheRead: 0, cacheWrite: 0, totalTokens: 15, cost };
const text = (words) => ({ type: "text", text: words });
const image = { type: "image", data: png, mimeType: "image/png" };

const session = SessionManager.create("/home/user/project", made);
let time = 1733234400000;
const say = (message) => session.appendMessage({ ...message, timestamp: (time += 1000) });
const user = (content) => say({ role: "user", content });
const result = (toolCallId, content, isError, more = {}) => say({ role: "toolResult", toolCallId, toolName: "read", content, isError, ...more });
const assistant = (content, stopReason = "stop", more = {}) =>
  say({ role: "assistant", content, api: "anthropic-messages", provider: "anthropic", model: "claude-sonnet-4-5", usage, stopReason, ...more });

session.appendModelChange("anthropic", "claude-sonnet-4-5");
session.appendThinkingLevelChange("high");
const read = { name: "read", description: "Read a file", parameters: { type: "object", properties: { path: { type: "string" } } } };
say({ role: "system", content: "Be brief.", sections: { preamble: "You help.", cwd: "/home/user/project", gone: null }, toolsAdded: [read] });
const first = user([text("Was ist das? \u{1F43C}"), image]);
assistant(
  [
    { type: "thinking", thinking: "Look.", thinkingSignature: "c2ln" },
    { ...text("I read two."), textSignature: "x" },
    { type: "toolCall", id: "c1", name: "read", arguments: { path: "a" }, thoughtSignature: "th" },
    { type: "toolCall", id: "c2", name: "read", arguments: { path: "b" } },
  ],
  "toolUse",
  { responseId: "msg_1" },
);
result("c1", [text("A")], false, { details: { lines: 1 } });
const second = result("c2", [text("B"), image], true);
const answer = assistant([text("One."), text("Two.")]);
session.appendLabelChange(answer, "checkpoint");
session.appendSessionInfo("A session with everything");
session.branch(first);
assistant([], "aborted", { errorMessage: "stopped" });
session.branchWithSummary(second, "The other branch came to nothing.", { readFiles: ["a"] }, true);
const bash = { role: "bashExecution", command: "ls", output: "a\nb", exitCode: 2, cancelled: false, truncated: false };
say(bash);
say({ ...bash, command: "env", output: "SECRET", exitCode: 0, excludeFromContext: true });
session.appendCustomEntry("my-extension", { count: 42 });
session.appendCustomMessageEntry("my-extension", "Injected.", true, { why: 1 });
const kept = session.appendCustomMessageEntry("my-extension", [text("seen"), image], false);
say({ role: "custom", customType: "other", content: "As a message.", display: true });
assistant([{ type: "thinking", thinking: "", thinkingSignature: "cmVk", redacted: true }, text("Go on.")]);
session.appendCompaction("They read a and b.", kept, 50000, { modifiedFiles: [] }, false, usage);
user("After it.");
session.appendUsage?.("cache_warm", "anthropic", "claude-sonnet-4-5", usage);
session.appendContextEdit?.(kept, null);
session.appendLabelChange(first, "start");
session.appendLabelChange(answer, undefined);
session.branch(first);
assistant([text("A third child.")], "length");
session.resetLeaf();
user("A second root.");
assistant([text("The end.")]);

const put = (name, file) => writeFileSync(join(folder, name), readFileSync(file, "utf8").replaceAll(made, "/home/user/sessions"));
put("everything.jsonl", session.getSessionFile());
put("fork.jsonl", session.createBranchedSession(second));
for (const name of ["v1", "v2"]) {
  const file = join(made, `${name}.jsonl`);
  copyFileSync(join(here, `${name}.jsonl`), file);
  SessionManager.open(file); // migrates it in its place
  put(`${name}.migrated.jsonl`, file);
}
