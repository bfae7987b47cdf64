// Puts the page together: tabs, the API key, the feed, and who shows what of it.

import { apiKey, getJson, setApiKey } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Figures } from "./charts.js";
import { Chat } from "./chat.js";
import { find } from "./dom.js";
import { Feed } from "./feed.js";
import { describeCell, showLegend } from "./legend.js";
import { readTheme } from "./palette.js";
import { Tables } from "./tables.js";
import { showTenants } from "./tenants.js";
import { Tour } from "./tour.js";
import { showTree } from "./tree.js";

const TABS = ["memory", "chat"];
const HINT = find("readout").textContent;

const maps = new Map();
const figures = new Figures();
const tables = new Tables((frames, words) => {
  for (const map of maps.values()) map.light(frames);
  find("readout").textContent = words || HINT;
});
let picture = null;

const mode = () => document.querySelector("#colour-by input:checked").value;
const shownTab = () => TABS.find((name) => !find(name).hidden);

function showMemory() {
  if (picture === null || shownTab() !== "memory") return;
  find("block-size").textContent = picture.block_size;
  for (const tier of picture.tiers) {
    if (!maps.has(tier.name)) {
      const map = new BlockMap(tier.name, (map, cell) => {
        find("readout").textContent = cell < 0 ? HINT : describeCell(map, cell);
      });
      maps.set(tier.name, map);
      find("tiers").append(map.element);
    }
    maps.get(tier.name).update(picture, tier, mode());
  }
  showLegend(picture, mode());
  tables.update(picture);
  showTree(picture);
  showTenants(picture);
}

function showAnew() {
  readTheme();
  if (picture === null) return;
  picture = { ...picture, tiers: picture.tiers.map((tier) => ({ ...tier, changed: null })) };
  showMemory();
}

function showTab(name) {
  for (const one of TABS) {
    const tab = find(`tab-${one}`);
    find(one).hidden = one !== name;
    tab.setAttribute("aria-selected", one === name);
    tab.tabIndex = one === name ? 0 : -1;
  }
  location.replace(`#${name}`);
  scrollTo(0, 0);
  showAnew();
  if (name === "chat") chat.show(picture);
}

const feed = new Feed({
  onPicture: (next) => {
    picture = next;
    figures.update(picture);
    showMemory();
    if (shownTab() === "chat") chat.update(picture);
    tour.update(picture);
  },
  onState: (state, words = "Live") => {
    find("live").dataset.state = state;
    if (find("live").textContent !== words) find("live").textContent = words;
  },
  onRefused: (reason) => askForKey(reason),
});
const chat = new Chat(find("chat"), () => picture);
const tour = new Tour(find("tour"), showTab);

async function begin() {
  feed.stop();
  feed.start();
  try {
    const { data } = await getJson("/v1/models");
    find("model").textContent = data[0].id;
    chat.model = data[0].id;
    await chat.loadSessions();
  } catch (error) {
    find("model").textContent = error.status ? "" : "no answer from the server";
  }
}

function askForKey(reason) {
  const dialog = find("key-dialog");
  if (dialog.open) return;
  find("key-reason").textContent = `${reason ? `${reason}. ` : ""}A key is kept in this tab only, and forgotten when you close it.`;
  find("key").value = apiKey();
  dialog.showModal();
}

find("key-form").addEventListener("submit", (event) => {
  if (event.submitter?.value === "cancel") return;
  setApiKey(find("key").value.trim());
  begin();
});
find("open-key").addEventListener("click", () => askForKey(""));
find("open-tour").addEventListener("click", () => tour.start());
find("colour-by").addEventListener("change", showAnew);
for (const name of TABS) {
  find(`tab-${name}`).addEventListener("click", () => showTab(name));
  find(`tab-${name}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = TABS.find((one) => one !== name);
    showTab(other);
    find(`tab-${other}`).focus();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAnew);
readTheme();
if (location.hash === "#chat") showTab("chat");
begin();
